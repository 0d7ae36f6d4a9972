"""From the steps of a resolution to the calls that run, each by the algorithm that is cheapest on the links.

The calls of a backward are read off the ops' own records: nothing runs, no process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import TorchDispatchMode, schema
from hetu_fx.comm_ops.ops.table import COMM_OPS, FUSED_OPS, OPS
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import CHOICES
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.resolve.resolution import OpCall, Resolution
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
            raise ResolveError(f"there is no lowering {self.choice!r}; choose one of {', '.join(CHOICES)}")
        if self.topology is None and self.choice in ("two_level", "padded"):
            raise ResolveError(f"lowering {self.choice!r} needs to know the nodes; give it a topology")

    def calls(self, resolution: Resolution, rank: int) -> tuple[OpCall, ...]:
        """Return the op calls of `rank`, in order, as `resolution.calls` does, with their algorithms."""
        return tuple(map(self.with_algorithm, resolution.calls(rank)))

    def with_algorithm(self, call: OpCall) -> OpCall:
        """Return a call with its algorithm as the last argument, but where it is flat."""
        algorithm = str(self.algorithm(call.op, *call.args))
        return OpCall(call.op, (*call.args, algorithm)) if algorithm else call

    def algorithm(self, op: str, *args: object) -> Algorithm:
        """Choose the algorithm of an op with these arguments, which start with its ranks or its change."""
        return FLAT if self.topology is None else OPS[op].algorithm(args, self.topology, self.choice)


class _Recorder(TorchDispatchMode):
    """Writes down calls of hetu ops instead of making them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OpCall] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = schema(func).name.partition("::")
        if namespace != "hetu":
            return func(*args, **(kwargs or {}))
        self.calls.append(OpCall(name, args[1:]))
        result: Tensor = args[0].clone()
        return result


def adjoint_calls(call: OpCall) -> tuple[OpCall, ...]:
    """Return the calls that take the gradient of the call's result to that of its input; none: it passes as it is.

    Of an op that computes too, only the name of the one that its backward runs is told.
    """
    if call.op in FUSED_OPS:
        name = FUSED_OPS[call.op].backward_op
        return () if name is None else (OpCall(name, ()),)
    with torch.no_grad(), _Recorder() as recorder:
        COMM_OPS[call.op].adjoint(torch.empty(0), *call.args)
    return tuple(recorder.calls)
