"""The communication ops of a device graph, and which of them send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from hetu_fx.base.torch_private import short_name
from hetu_fx.comm_ops.ops.op import OpRecord
from hetu_fx.comm_ops.ops.table import OPS
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.graph import meta
from hetu_fx.graph.calls import overload
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


def communications(device: DeviceGraph) -> Iterator[fx.Node]:
    """Yield the nodes of a device graph that call communication ops, those that send nothing included."""
    return (node for node in device.graph.nodes if node.op == "call_function" and node.target in _RECORDS)


def comm_call(node: fx.Node) -> OpCall:
    """Return the call that a communication node makes; sizes that only the run tells are the example batch's.

    A call is told without its tensors.
    """
    name = short_name(overload(node))
    return OpCall(name, tuple(fx.node.map_arg(node.args[OPS[name].tensors :], meta.value)))


def sends(node: fx.Node) -> bool:
    """Tell whether an op sends in forward: one that communicates and does not leave that to its adjoint."""
    record = _RECORDS.get(node.target)
    return record is not None and record.sends(node.args)


_RECORDS: Mapping[Any, OpRecord] = {record.overload: record for record in OPS.values()}
