"""Count what a device graph communicates, forward and backward, block by block.

The backward is read off the adjoints of the communication ops, each run once on a stand-in: an op has one where a
gradient flows through it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from hetu_fx.base.torch_private import short_name
from hetu_fx.comm_ops.ops.table import OPS
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS
from hetu_fx.comm_ops.resolve.lowering import adjoint_calls
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.calls import overload
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


def communications(device: DeviceGraph) -> Iterator[fx.Node]:
    """Yield the nodes of a device graph that call communication ops, those that send nothing included."""
    targets = {record.overload for record in OPS.values()}
    return (node for node in device.graph.nodes if node.op == "call_function" and node.target in targets)


def comm_call(node: fx.Node) -> OpCall:
    """Return the call that a communication node makes; sizes that only the run tells are the example batch's.

    A call is told without its tensors.
    """
    name = short_name(overload(node))
    return OpCall(name, tuple(fx.node.map_arg(node.args[OPS[name].tensors :], meta.value)))


def sends(node: fx.Node) -> bool:
    """Tell whether an op sends in forward: one that communicates and does not leave that to its adjoint."""
    return node.target in _SENDING


def _sending(calls: Sequence[OpCall]) -> tuple[str, ...]:
    return tuple(call.op for call in calls if OPS[call.op].overload in _SENDING)


_SENDING = {record.overload for record in OPS.values() if record.cost(1.0, (0, 1), EQUAL_LINKS)}


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
