"""What a sequence of steps costs, for choosing among several: by bytes, or by seconds on measured links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetu_fx.annotations.annotation import Shape
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove
from hetu_fx.comm_ops.plans.bsr_report import least_bytes
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS, Topology
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, Steps
from hetu_fx.comm_ops.resolve.resolution import AxisStep, CommStep, MoveStep, steps_bytes, steps_seconds


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
        least = least_bytes(TensorMove(edge.source, edge.target, _known(edge.shape), self.itemsize))
        return steps_bytes(known, self.itemsize) <= least


def _with_known_sizes(step: CommStep) -> CommStep:
    return replace(step, shape=_known(step.shape)) if None in step.shape else step


def _known(shape: Shape) -> Shape:
    return tuple(1 if size is None else size for size in shape)
