"""Put the ops of a captured graph on a device: where it says "host" for whoever runs it, it says that device then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.base.torch_private import OpOverload, argument_names, tree_map
from hetu_fx.graph import meta

aten = torch.ops.aten


def place_ops(graph: fx.Graph, device: torch.device) -> Counter[str]:
    """Let a flat graph make its tensors on a device; changes it in place.

    Ops that are to run on the host, or that the type of device lacks, read and make tensors there, and their results
    are brought to the device.

    Returns:
        how many of the latter there are, by name.
    """
    lacks, on_host = device_type_record(device).lacks, Counter[str]()
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        is_lacking = str(node.target) in lacks
        if device != HOST and (is_lacking or meta.runs_on_host(node)):
            on_host[str(node.target)] += is_lacking
            _make_at(node, HOST)
            _move(node, device)
        else:
            _make_at(node, device)
    return +on_host


def placed_copy(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Return a copy of a flat graph, put on a device."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    place_ops(copy, device)
    return copy


def _make_at(node: fx.Node, device: torch.device) -> None:
    """Let an op make its tensors there: where it names a device, or would make them of nothing on the host."""

    def named(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args, node.kwargs = tree_map(named, node.args), tree_map(named, dict(node.kwargs))
    makes = "device" in argument_names(node.target).all and not any(map(meta.is_tensor, node.all_input_nodes))
    if makes and node.kwargs.get("device") is None and device != HOST:
        node.update_kwarg("device", device)


def _move(node: fx.Node, device: torch.device) -> None:
    """Let an op read tensors on the host, and its users have the results on the device."""

    def moved(argument: Any) -> Any:
        is_tensor = isinstance(argument, fx.Node) and meta.is_tensor(argument)
        return _to(argument, HOST, node.graph.inserting_before(node)) if is_tensor else argument

    node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, dict(node.kwargs))
    results = [node] if meta.is_tensor(node) else [user for user in node.users if meta.is_tensor(user)]
    for result in results:
        users = list(result.users)
        back = _to(result, device, node.graph.inserting_after(result))
        for user in users:
            user.replace_input_with(result, back)


def _to(value: fx.Node, device: torch.device, place: Any) -> fx.Node:
    with place:
        made = value.graph.call_function(aten.to.device, (value, device, meta.dtype(value)))
    meta.copy_meta(value, made, with_value=True)
    return made
