"""Every error that hetu_fx raises on purpose.

HetuFxError
 |- EnvironmentProblem   torch version, launcher, cgroups, permissions
 |- CaptureError         the model could not be captured as a graph
 |- AnnotationError      an annotation that cannot be
 |- ResolveError         no communication turns one annotation into another
 |- RuleError            a malformed op rule
 |- DeductionError       shardings that do not fit together
 |- PlanError            a plan (file) that cannot be, or does not fit the model or the world
 |- ClusterError         a malformed cluster (file)
 |- ProfileError         a malformed profile (file), or one without what a search needs
 |- BatchError           a batch that does not fit the captured model, or differs between ranks
 |- ForwardCheckError    the forward checks values of a batch, and raises for them
 |- AlignError           a file of ops to align, or a way to run them, that cannot be
 |- CheckError           a plan that was tried, and does not give what one device gives
 |- StateError           a call at the wrong time, or state that is not where it should be
 |- CheckpointError      a checkpoint that is missing, torn or of another model
 |- ExportError          an export folder that cannot be written or read
 `- CommError            a collective that failed or timed out
     `- DivergedError    ranks make different calls, or one has left: the others would wait for ever

Messages say what happened, where, the values, and on a line of its own, `hint: ...`, what to do.
"""

from __future__ import annotations


class HetuFxError(Exception):
    """Base of every error raised on purpose by hetu_fx."""


class EnvironmentProblem(HetuFxError):
    """The machine, the launcher or an installed package lacks something.

    Hint: run `hetu-fx doctor`, which looks at all three. The message names the missing package, variable or right.
    """


class CaptureError(HetuFxError):
    """The model could not be captured as a single-device graph.

    Hint: rewrite the line that the message names, or run the module as it is with
    `auto_parallelize(..., capture="eager")`, which is data parallel only.
    """


class AnnotationError(HetuFxError):
    """An annotation contradicts itself, its devices or the shape it is used on.

    Hint: correct the annotation. `hetu_fx.annotations.annotation.parse_annotation` reads its short notation.
    """


class ResolveError(HetuFxError):
    """No sequence of communication steps turns one annotation into another.

    Hint: change one of the two annotations in the message; in a plan, the ratios or devices of the stage.
    """


class RuleError(HetuFxError):
    """An op rule is malformed or contradicts the op it is registered for.

    Hint: correct the rule given to `hetu_fx.register_rule`. The message has the operands of both.
    """


class DeductionError(HetuFxError):
    """The shardings of a graph do not fit together.

    Hint: use another plan, or register a rule for the op in the message (`hetu_fx.register_rule`).
    """


class PlanError(HetuFxError):
    """A plan is malformed, or does not fit the model or the world.

    Hint: correct the key in the message, or leave the plan out: `plan="auto"` makes one that fits. docs/plan_file.md
    has all keys.
    """


class ClusterError(HetuFxError):
    """A cluster description is malformed or does not fit the world.

    Hint: correct the key in the message, or measure: `hetu-fx measure --cluster cluster.json`.
    """


class ProfileError(HetuFxError):
    """A profile of a model is malformed, or lacks what a search needs.

    Hint: correct the key in the message, or measure: `hetu-fx measure MODULE:FUNCTION`.
    """


class BatchError(HetuFxError):
    """A batch does not fit the captured model, or differs between ranks.

    Hint: pass what the message asks for: the same inputs on all ranks, sizes like those of the example batch, or a mask
    where sequences are padded.
    """


class ForwardCheckError(HetuFxError):
    """The model's forward checks values of a batch, and raises for them. Every rank raises it.

    The error also has the type that the forward raises, so that `except ValueError` catches it.

    Hint: change the values in the message, or the check at the line that it names.
    """


class AlignError(HetuFxError):
    """A file of op overrides, of a saved op or of losses is malformed, or a way to run ops is not known.

    Hint: correct the name or key in the message, or have `hetu-fx-align` write the file again.
    """


class CheckError(HetuFxError):
    """A trial of the plan on a small model and batch gives other numbers than one device.

    Hint: report the case at the end of the message, and use another plan until it is fixed. `check=False` trains
    anyway, with the difference in the message.
    """


class StateError(HetuFxError):
    """A call came at the wrong time, or state is not where it should be.

    Hint: make the call where the message says, on all ranks. `hetu_fx.full_tensor` reads parallel tensors.
    """


class OtherRankError(StateError):
    """Another rank failed in a call that all ranks make together. The message has its error.

    Hint: fix the error of that rank. This rank was only waiting.
    """


class CheckpointError(HetuFxError):
    """A checkpoint is missing, torn, or belongs to another model.

    Hint: load another folder. A search for the newest checkpoint skips torn ones. If a save failed, the previous
    checkpoint is still there.
    """


class ExportError(HetuFxError):
    """An export folder cannot be written or read.

    Hint: name an empty folder to write, or export again with the installed version.
    """


class CommError(HetuFxError):
    """A collective operation failed or timed out.

    Hint: read the error of the rank that failed, and check that all ranks reach each other (`hetu-fx doctor` in the
    job). With `model.hetu.snapshots` and `hetu-fx launch` a job survives lost ranks.
    """


class DivergedError(CommError):
    """The ranks make different calls. The message says where each of them is.

    Hint: make the call on all ranks. If a rank is only slow, raise `hetu_fx.Options(wait_seconds=...)` or
    HETU_FX_WAIT_SECONDS.
    """
