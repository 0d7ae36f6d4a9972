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

Messages say what, where, the values, and the way out.
"""

from __future__ import annotations


class HetuFxError(Exception):
    """Base of every error raised on purpose by hetu_fx."""


class EnvironmentProblem(HetuFxError):
    """The machine, the launcher or an installed package is not what is needed.

    Way out: `hetu-fx doctor` looks at all of them; the message names the package, variable or right that is missing.
    """


class CaptureError(HetuFxError):
    """The model could not be captured as a single-device graph.

    Way out: rewrite the line that the message names, or run the module as it is with
    `auto_parallelize(..., capture="eager")`, data parallel only.
    """


class AnnotationError(HetuFxError):
    """An annotation contradicts itself, its devices or the shape it is used on.

    Way out: correct the annotation; `hetu_fx.annotations.annotation.parse_annotation` reads its short notation.
    """


class ResolveError(HetuFxError):
    """No sequence of communication steps turns one annotation into another.

    Way out: change one of the two annotations that the message names; in a plan, the ratios or devices of the stage.
    """


class RuleError(HetuFxError):
    """An op rule is malformed or contradicts the op it is registered for.

    Way out: correct the rule given to `hetu_fx.register_rule`; the message has the op's operands and the rule's.
    """


class DeductionError(HetuFxError):
    """The shardings of a graph do not fit together.

    Way out: use another plan, or register a rule for the op that the message names (`hetu_fx.register_rule`).
    """


class PlanError(HetuFxError):
    """A plan is malformed, or does not fit the model or the world.

    Way out: correct the key that the message names, or leave the plan out: `plan="auto"` makes one that fits.
    docs/plan_file.md has all keys.
    """


class ClusterError(HetuFxError):
    """A cluster description is malformed or does not fit the world.

    Way out: correct the key that the message names, or measure: `hetu-fx measure --cluster cluster.json`.
    """


class ProfileError(HetuFxError):
    """A profile of a model is malformed, or lacks what a search needs.

    Way out: correct the key that the message names, or measure: `hetu-fx measure MODULE:FUNCTION`.
    """


class BatchError(HetuFxError):
    """A batch does not fit the captured model, or differs between ranks.

    Way out: bring what the message asks for: the same inputs on all ranks, sizes that the model was captured with, a
    mask where sequences are padded.
    """


class ForwardCheckError(HetuFxError):
    """The model's forward checks values of a batch, and raises for them; every rank raises it, whoever has the rows.

    It is of the type that the forward raises as well, so that `except ValueError` catches it.

    Way out: see what the message says of the values; the line that it names is the check.
    """


class AlignError(HetuFxError):
    """A file of op overrides, of a saved op or of losses is malformed, or a way to run ops is not known.

    Way out: correct the name or the key that the message names, or let `hetu-fx-align` write the file again.
    """


class CheckError(HetuFxError):
    """A plan was tried before it trains, cut small, and does not give what one device gives.

    Way out: report the case that the message ends with, and use another plan meanwhile; `check=False` trains all the
    same, and gives what the message says.
    """


class StateError(HetuFxError):
    """A call came at the wrong time, or state is not where it should be.

    Way out: make the call where the message says, on all ranks; parallel tensors are read by `hetu_fx.full_tensor`.
    """


class OtherRankError(StateError):
    """Another rank failed in what all do together; the message has its error.

    Way out: mend what that rank's error says; this rank has only waited for it.
    """


class CheckpointError(HetuFxError):
    """A checkpoint is missing, torn, or belongs to another model.

    Way out: load another folder; torn ones are skipped where the newest of several is looked for. Where writing
    failed, the one before is still there.
    """


class ExportError(HetuFxError):
    """An export folder cannot be written or read.

    Way out: name an empty folder to write, or export again with the version that is installed.
    """


class CommError(HetuFxError):
    """A collective operation failed or ran out of time.

    Way out: see what the rank that failed said, and whether all ranks reach each other (`hetu-fx doctor` in the job);
    `model.hetu.snapshots` and `hetu-fx launch` go on after lost processes.
    """


class DivergedError(CommError):
    """A rank has left the path that all must take together; the message says where each of them is.

    Way out: make the call that one rank made alone on all ranks. Raise `hetu_fx.Options(wait_seconds=...)` or
    HETU_FX_WAIT_SECONDS where a rank is only slow.
    """
