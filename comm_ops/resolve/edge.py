"""A change to be resolved: a tensor, how it is annotated before and after, and how its gradient comes back."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import Duplicate, Partial, Split, State
from hetu_fx.comm_ops.resolve.resolution import CommStep, MoveStep

Steps = tuple[CommStep, ...]


@dataclass(frozen=True, slots=True)
class ReshardEdge:
    """Asks for a tensor of global `shape` to go from `source` to `target`.

    `gradient` annotates the gradient of the result: cotangent(target), but some duplicates may be partial.
    """

    source: Annotation
    target: Annotation
    gradient: Annotation
    shape: Shape

    @classmethod
    def plain(cls, source: Annotation, target: Annotation, shape: Shape) -> ReshardEdge:
        """Ask for a change whose gradient is no more partial than it must be."""
        return cls(source, target, cotangent(target), shape)

    @property
    def is_plain(self) -> bool:
        """Whether the gradient is no more partial than it must be."""
        return self.gradient == cotangent(self.target)

    @property
    def is_idle(self) -> bool:
        """Whether every rank keeps what it has, forward and backward."""
        source, target = self.source, self.target
        if not self.is_plain or source == target:
            return self.is_plain
        if source.has_partial or target.has_partial or set(source.ranks) != set(target.ranks):
            return False
        return all(source.region(rank, self.shape) == target.region(rank, self.shape) for rank in source.ranks)

    @property
    def move(self) -> MoveStep:
        """The step that makes any change: one batched send-receive."""
        return MoveStep(self.source, self.target, self.gradient, self.shape)

    @property
    def flat(self) -> ReshardEdge:
        """The same with unions of equal shardings written as single groups, if all three are."""
        found = ReshardEdge(flatten(self.source), flatten(self.target), flatten(self.gradient), self.shape)
        tops = (found.source.top, found.target.top, found.gradient.top)
        return found if tops == (None, None, None) else self

    def of_group(self, index: int) -> ReshardEdge:
        """Return the change of one group's piece, where both sides have the same top."""
        source, target, gradient = (
            Annotation((a.groups[index],), (a.shardings[index],)) for a in (self.source, self.target, self.gradient)
        )
        return ReshardEdge(source, target, gradient, piece_shape(self.source.top, index, self.shape))


def dual(top: State | None) -> State | None:
    """Return the state of a gradient: partial becomes duplicate."""
    return Duplicate(top.ways) if isinstance(top, Partial) else top


def flatten(annotation: Annotation) -> Annotation:
    """Write a union of equal shardings as one group, its slowest axis the top, where that means the same."""
    top, sharding = annotation.top, annotation.shardings[0]
    if top is None or any(other != sharding for other in annotation.shardings):
        return annotation
    if isinstance(top, Duplicate) and sharding.num_summands > 1:
        # Groups hold equal values, but need not hold equal summands; copies inside a group do.
        return annotation
    if isinstance(top, Split) and any(split.dim == top.dim for split in sharding.splits):
        return annotation
    return Annotation.on(annotation.ranks, top, *sharding.axes)


def piece_shape(top: State | None, index: int, shape: Shape) -> Shape:
    """Return the shape of what a group holds of a tensor under `top`."""
    if not isinstance(top, Split):
        return shape
    size = shape[top.dim]
    assert size is not None  # symbolic dims are never split, which is checked first
    return (*shape[: top.dim], top.local_size(size, index), *shape[top.dim + 1 :])
