"""A change to be resolved: a tensor, how it is annotated before and after, and how its gradient comes back.

And what steps that make it cost, for choosing among several: by bytes, or by seconds on measured links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS, Topology
from hetu_fx.comm_ops.resolve.intermediates import flatten, piece_shape
from hetu_fx.comm_ops.resolve.resolution import AxisStep, CommStep, MoveStep, steps_bytes, steps_seconds

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


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Prices steps for entries of `itemsize` bytes; a symbolic size counts as one.

    With a topology seconds decide, then bytes; without one bytes decide, then seconds on equal links. Fewer
    steps win a tie, and of equally many those that come first.
    """

    topology: Topology | None = None
    itemsize: int = 4

    def of(self, steps: Sequence[CommStep]) -> tuple[float, float, int]:
        """Price the forward; adjoints move as much the other way."""
        known = [_with_known_sizes(step) for step in steps]
        num_bytes = steps_bytes(known, self.itemsize)
        if self.topology is None:
            return num_bytes, steps_seconds(known, self.itemsize, EQUAL_LINKS), len(known)
        return steps_seconds(known, self.itemsize, self.topology), num_bytes, len(known)

    def settles(self, edge: ReshardEdge, steps: Steps) -> bool:
        """Tell whether nothing can be better, so that no other way need be priced.

        Without a topology that is so for collectives inside groups, which have the fast links, and for whatever
        moves as little as any plan must. A batched send-receive of summands may still load one rank too much.
        """
        if not steps:
            return True
        if self.topology is not None or any(isinstance(s, MoveStep) and s.source.has_partial for s in steps):
            return False
        if all(isinstance(step, AxisStep) for step in steps):
            return True
        known = [_with_known_sizes(step) for step in steps]
        move = TensorMove(edge.source, edge.target, _known(edge.shape), self.itemsize)
        return steps_bytes(known, self.itemsize) <= move.least_bytes


def _with_known_sizes(step: CommStep) -> CommStep:
    return replace(step, shape=_known(step.shape)) if None in step.shape else step


def _known(shape: Shape) -> Shape:
    return tuple(1 if size is None else size for size in shape)
