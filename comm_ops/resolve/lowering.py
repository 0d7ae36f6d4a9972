"""From the steps of a resolution to the calls that run, each in the form that is cheapest on the links."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.comm_ops.ops.table import OPS
from hetu_fx.comm_ops.plans.algorithm import FLAT, Form
from hetu_fx.comm_ops.plans.choose_algorithm import CHOICES
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.resolve.resolution import Call, Resolution
from hetu_fx.errors import ResolveError


@dataclass(frozen=True, slots=True)
class Lowering:
    """Says on which links calls will run, and how their form is chosen: a pure decision, alike on all ranks.

    `choice` is "auto" (by cost), or for comparison "flat", "two_level" or "padded" wherever that can be.
    Without a `topology` everything is flat.
    """

    topology: Topology | None = None
    choice: str = "auto"

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ResolveError(f"there is no lowering {self.choice!r}; choose one of {', '.join(CHOICES)}")
        if self.topology is None and self.choice in ("two_level", "padded"):
            raise ResolveError(f"lowering {self.choice!r} needs to know the nodes; give it a topology")

    def calls(self, resolution: Resolution, rank: int) -> tuple[Call, ...]:
        """Give the op calls of `rank`, in order, as `resolution.calls` does, with their forms."""
        return tuple(map(self.formed, resolution.calls(rank)))

    def formed(self, call: Call) -> Call:
        """Give a call with its form as the last argument, but where it is flat."""
        form = str(self.form(call.op, *call.args))
        return Call(call.op, (*call.args, form)) if form else call

    def form(self, op: str, *args: object) -> Form:
        """Choose the form of an op with these arguments, which start with its ranks or its change."""
        return FLAT if self.topology is None else OPS[op].form(args, self.topology, self.choice)
