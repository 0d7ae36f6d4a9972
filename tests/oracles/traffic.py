"""Count what a device graph communicates, forward and backward, block by block.

The backward is read off the adjoints of the communication ops, each run once on a stand-in: an op has one where a
gradient flows through it. Nothing is sent, no process group is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.torch_private import TorchDispatchMode, schema
from hetu_fx.comm_ops.ops.table import COMM_OPS, FUSED_OPS, OPS
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.transforms.lowering.graph_traffic import comm_call, communications
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


@dataclass(frozen=True, slots=True)
class Traffic:
    """How often each communication op runs, by name; ops that send nothing are left out."""

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write `forward 2 all_reduce; backward 2 all_reduce`."""
        return f"forward {_text(self.forward)}; backward {_text(self.backward)}"


def traffic_by_block(device: DeviceGraph, block_paths: Sequence[str]) -> dict[int | None, Traffic]:
    """Return the traffic of each repeated block of a device graph, and of all that stands outside of them (None).

    What is sent forward belongs to the block that makes the value, what is sent backward to the one that reads it.

    Args:
        device: the graph of one rank.
        block_paths: FQNs of the model's repeated blocks, as `Graph.block_paths` has them.
    """
    forward: defaultdict[int | None, Counter[str]] = defaultdict(Counter)
    backward: defaultdict[int | None, Counter[str]] = defaultdict(Counter)
    for node in communications(device):
        maker, reader = (block_index(meta.module_stack(at), block_paths) for at in (node, next(iter(node.users))))
        call = comm_call(node)
        forward[maker].update(_sending([call]))
        if node in device.differentiable:
            backward[reader].update(_sending(adjoint_calls(call)))
    return {block: Traffic(dict(forward[block]), dict(backward[block])) for block in {**forward, **backward}}


def _sending(calls: Sequence[OpCall]) -> tuple[str, ...]:
    return tuple(call.op for call in calls if OPS[call.op].cost(1.0, (0, 1), EQUAL_LINKS))


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"


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
