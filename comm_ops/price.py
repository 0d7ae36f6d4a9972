"""What a sequence of steps costs, for choosing among several: by bytes, or by seconds on measured links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetu_fx.comm_ops.bsr_plan import Move
from hetu_fx.comm_ops.bsr_report import least_bytes
from hetu_fx.comm_ops.cost import Topology
from hetu_fx.comm_ops.edge import Edge, Steps
from hetu_fx.comm_ops.resolution import AxisStep, CommStep, MoveStep, steps_bytes, steps_seconds


@dataclass(frozen=True, slots=True)
class _EqualLinks:
    """Links that differ in nothing and start at once."""

    def bytes_per_second(self, a: int, b: int) -> float:
        return 1.0

    def latency_seconds(self, a: int, b: int) -> float:
        return 0.0

    def node_of(self, rank: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Prices:
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
            return num_bytes, steps_seconds(known, self.itemsize, _EqualLinks()), len(known)
        return steps_seconds(known, self.itemsize, self.topology), num_bytes, len(known)

    def settles(self, edge: Edge, steps: Steps) -> bool:
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
        shape = tuple(1 if size is None else size for size in edge.shape)
        return steps_bytes(known, self.itemsize) <= least_bytes(Move(edge.source, edge.target, shape, self.itemsize))


def _with_known_sizes(step: CommStep) -> CommStep:
    if None not in step.shape:
        return step
    return replace(step, shape=tuple(1 if size is None else size for size in step.shape))
