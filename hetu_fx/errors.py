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
    """The machine, the launcher or an installed package is not what is needed."""


class CaptureError(HetuFxError):
    """The model could not be captured as a single-device graph."""


class AnnotationError(HetuFxError):
    """An annotation contradicts itself, its devices or the shape it is used on."""


class ResolveError(HetuFxError):
    """No sequence of communication steps turns one annotation into another."""


class RuleError(HetuFxError):
    """An op rule is malformed or contradicts the op it is registered for."""


class DeductionError(HetuFxError):
    """The shardings of a graph do not fit together."""


class PlanError(HetuFxError):
    """A plan is malformed, or does not fit the model or the world."""


class ClusterError(HetuFxError):
    """A cluster description is malformed or does not fit the world."""


class ProfileError(HetuFxError):
    """A profile of a model is malformed, or lacks what a search needs."""


class BatchError(HetuFxError):
    """A batch does not fit the captured model, or differs between ranks."""


class StateError(HetuFxError):
    """A call came at the wrong time, or state is not where it should be."""


class OtherRankError(StateError):
    """Another rank failed in what all do together; the message has its error."""


class CheckpointError(HetuFxError):
    """A checkpoint is missing, torn, or belongs to another model."""


class ExportError(HetuFxError):
    """An export folder cannot be written or read."""


class CommError(HetuFxError):
    """A collective operation failed or ran out of time."""


class DivergedError(CommError):
    """A rank has left the path that all must take together; the message says where each of them is."""
