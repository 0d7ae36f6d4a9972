"""The closed list of reasons why a change is not resolved. Every other change is."""

from __future__ import annotations

from enum import Enum

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import Split
from hetu_fx.comm_ops.plans.transition import format_shape
from hetu_fx.errors import AnnotationError, ResolveError


class Refusal(Enum):
    """Says why, and what to do instead."""

    NO_SUCH_DIM = "an annotation splits a dim that the tensor has not; annotate the tensor's own dims"
    SYMBOLIC = "a split dim has no known size; resolve anew for every size, or split another dim"
    SIZE = "a size does not divide into the parts of a split; choose parts whose sum divides it"
    GRADIENT = (
        "the gradient's annotation does not belong to the target; it may differ from cotangent(target) only in "
        "duplicates that are partial"
    )


class RefusedError(ResolveError):
    """A change that is not resolved; `reason` is one of the closed list."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_fits(annotation: Annotation, shape: Shape, what: str) -> None:
    """Raise RefusedError where a tensor of `shape` cannot be annotated so."""
    try:
        annotation.check_shape(shape)
    except AnnotationError as error:
        raise RefusedError(_why(annotation, shape), f"{what} of {format_shape(shape)}: {error}") from error


def check_gradient(target: Annotation, gradient: Annotation) -> None:
    """Raise RefusedError where `gradient` cannot annotate the gradient of what `target` annotates."""
    if cotangent(gradient) != cotangent(target):
        raise RefusedError(
            Refusal.GRADIENT,
            f"{gradient} cannot annotate the gradient of {target}: {Refusal.GRADIENT.value}",
        )


def _why(annotation: Annotation, shape: Shape) -> Refusal:
    tops = (annotation.top,) if isinstance(annotation.top, Split) else ()
    dims = {split.dim for split in (*tops, *(s for sharding in annotation.shardings for s in sharding.splits))}
    if max(dims) >= len(shape):
        return Refusal.NO_SUCH_DIM
    return Refusal.SYMBOLIC if any(shape[dim] is None for dim in dims) else Refusal.SIZE
