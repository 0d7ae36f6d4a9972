"""From the steps of a resolution to the calls that run, each by the algorithm that is cheapest on the links."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.comm_ops.ops.table import OPS
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import CHOICES
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.errors import ResolveError


@dataclass(frozen=True, slots=True)
class Lowering:
    """Says on which links calls will run, and how their algorithm is chosen: a pure decision, alike on all ranks.

    `choice` is "auto" (by cost), or for comparison "flat", "two_level" or "padded" wherever that can be.
    Without a `topology` everything is flat.
    """

    topology: Topology | None = None
    choice: str = "auto"

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ResolveError(f"there is no lowering {self.choice!r}\nhint: choose one of {', '.join(CHOICES)}")
        if self.topology is None and self.choice in ("two_level", "padded"):
            raise ResolveError(f"lowering {self.choice!r} needs to know the nodes\nhint: give it a topology")

    def with_algorithm(self, call: OpCall) -> OpCall:
        """Return a call with its algorithm as the last argument, but where it is flat."""
        algorithm = str(self.algorithm(call.op, *call.args))
        return OpCall(call.op, (*call.args, algorithm)) if algorithm else call

    def algorithm(self, op: str, *args: object) -> Algorithm:
        """Choose the algorithm of an op with these arguments, which start with its ranks or its change."""
        return FLAT if self.topology is None else OPS[op].algorithm(args, self.topology, self.choice)
