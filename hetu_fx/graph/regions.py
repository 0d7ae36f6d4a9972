"""Inline no-grad and autocast regions, keeping what they mean.

torch.export wraps such regions in higher-order ops around submodules. A no-grad region becomes its ops,
marked, and `detach_at_exits` puts a detach where a value leaves it; an autocast region becomes its ops with
the casts written out, as the autocast kernels of its device would do them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hetu_fx.base.device_types import device_types
from hetu_fx.base.dtypes import autocast_casts, carries_gradient
from hetu_fx.base.torch_private import (
    HigherOrderOperator,
    OpOverload,
    dispatch_has_kernel,
    dispatch_name,
    is_of_transforms,
)
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.capture_failure import WAY_OUT, refusal
from hetu_fx.graph.tracing.meanings import TRANSFORMS

aten = torch.ops.aten


@dataclass(frozen=True)
class RegionModes:
    """What the surrounding regions say: gradients enabled, the autocast dtype by device type, or that there be none."""

    grad_enabled: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    forbids_casts: bool = False

    def entering_autocast(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> RegionModes:
        """Return what holds inside an autocast context."""
        kept = tuple(item for item in self.autocast if item[0] != device_type)
        inside = ((device_type, dtype or torch.get_autocast_dtype(device_type)),) if enabled else ()
        return replace(self, autocast=kept + inside, forbids_casts=not enabled)


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """Return a flat copy of an exported graph: no submodules, no higher-order region ops.

    Raises:
        CaptureError: for other higher-order ops (control flow on tensors).
    """
    fresh = fx.Graph()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    copies = [fresh.node_copy(node) for node in placeholders]
    result = _emit(fresh, module, copies, RegionModes())
    fresh.output(tuple(result))
    return fresh


def casts(module: fx.GraphModule) -> bool:
    """Tell whether torch.autocast is on anywhere in an exported graph."""
    for node in module.graph.nodes:
        named = isinstance(node.target, HigherOrderOperator) and dispatch_name(node.target)
        if named == "wrap_with_autocast" and node.args[2]:
            return True
    parts = (child for child in module.children() if isinstance(child, fx.GraphModule))
    return any(casts(part) for part in parts)


def _emit(fresh: fx.Graph, module: fx.GraphModule, arguments: Iterable[Any], modes: RegionModes) -> list[Any]:
    values: dict[fx.Node, Any] = {}
    remaining = iter(arguments)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            return list(fx.node.map_arg(node.args[0], values.__getitem__))
        elif node.op == "get_attr":
            values[node] = _submodule(module, node)
        elif isinstance(node.target, HigherOrderOperator):
            values[node] = _emit_region(fresh, node, values, modes)
        elif node.target is operator.getitem and isinstance(values[node.args[0]], list):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = _emit_op(fresh, node, values, modes)
    raise AssertionError("a graph ends with its output node")


def _submodule(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    attribute = getattr(module, str(node.target), None)
    assert isinstance(attribute, fx.GraphModule), "export lifts every tensor attribute to an input"
    return attribute


def _emit_region(fresh: fx.Graph, node: fx.Node, values: dict[fx.Node, Any], modes: RegionModes) -> list[Any]:
    assert isinstance(node.target, HigherOrderOperator)
    arguments: list[Any] = [values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
    match dispatch_name(node.target):
        case "wrap_with_set_grad_enabled":
            enabled, body, *inputs = arguments
            return _emit(fresh, body, inputs, replace(modes, grad_enabled=bool(enabled)))
        case "wrap_with_autocast":
            device_type, dtype, enabled, _, body, *inputs = arguments
            return _emit(fresh, body, inputs, modes.entering_autocast(device_type, dtype, enabled))
        case name:
            raise CaptureError(
                f"the model uses {name} at {meta.source_line(node)}, control flow inside the graph, which "
                f"cannot be sharded\nhint: {WAY_OUT}"
            )


def _emit_op(fresh: fx.Graph, node: fx.Node, values: dict[fx.Node, Any], modes: RegionModes) -> fx.Node:
    if is_of_transforms(node.target):
        raise refusal(meta.source_line(node), TRANSFORMS)
    copy = fresh.node_copy(node, values.__getitem__)
    meta.set_grad_enabled(copy, modes.grad_enabled)
    if modes.forbids_casts:
        meta.forbid_casts(copy)
    for device_type, dtype in modes.autocast:
        _write_casts(copy, device_type, dtype)
    return copy


def _write_casts(node: fx.Node, device_type: str, low: torch.dtype) -> None:
    """Cast the operands of an op that has an autocast kernel: to the low dtype if its result is, else up."""
    if not has_autocast_kernel(node.target, device_type) or not meta.has_value(node):
        return
    examples = meta.value(node)
    first = examples if isinstance(examples, torch.Tensor) else examples[0]
    if first.device.type != device_type and first.device.type != "meta":
        return
    target = low if first.dtype == low else torch.float32
    node.args = fx.node.map_arg(node.args, lambda arg: _cast(arg, node, target))
    node.kwargs = fx.node.map_arg(node.kwargs, lambda arg: _cast(arg, node, target))


def has_autocast_kernel(target: Any, device_type: str) -> bool:
    """Tell whether torch.autocast casts the operands of an op on a type of devices."""
    key = next((one.autocast_key for one in device_types() if one.name == device_type), None)
    if key is None or not isinstance(target, OpOverload):
        return False
    return dispatch_has_kernel(dispatch_name(target), key)


def _cast(argument: fx.Node, user: fx.Node, target: torch.dtype) -> fx.Node:
    if not _is_castable(argument) or meta.dtype(argument) == target:
        return argument
    if (known := _known_cast(argument, user, target)) is not None:
        return known
    with user.graph.inserting_before(user):
        cast = user.graph.call_function(aten.to.dtype, (argument, target))
    meta.copy_meta(user, cast)
    meta.infer(cast)
    return cast


def _is_castable(argument: fx.Node) -> bool:
    """Tell whether autocast casts a value: floating point, but for float64 (one region inside another mixes halves)."""
    return meta.is_tensor(argument) and autocast_casts(meta.dtype(argument))


def _known_cast(argument: fx.Node, user: fx.Node, target: torch.dtype) -> fx.Node | None:
    """Return an earlier cast of the same weight, as autocast's cache does."""
    casts = (cast for cast in argument.users if cast.target is aten.to.dtype and cast.args[1] == target)
    same_mode = (cast for cast in casts if meta.traced_with_grad(cast) == meta.traced_with_grad(user))
    return next(same_mode, None) if argument.op == "placeholder" else None


def gradient_carriers(graph: fx.Graph, differentiable: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that carry a gradient in the exported program, whose no-grad regions are marked."""
    carriers = set(differentiable)
    for node in graph.nodes:
        reached = node.op == "call_function" and carriers.intersection(node.all_input_nodes)
        if reached and meta.traced_with_grad(node) and not _stops_gradients(node):
            carriers.add(node)
    return carriers


def detach_at_exits(graph: fx.Graph, differentiable: Collection[fx.Node]) -> None:
    """Detach every value that leaves a no-grad region and would carry a gradient; drop the regions' marks.

    Args:
        graph: a flat graph whose nodes are marked by `inline_regions`.
        differentiable: the placeholders that may carry a gradient.
    """
    carries = set(differentiable)  # as the flat graph would have it without detach
    for node in list(graph.nodes):
        if node.op != "call_function" or not carries.intersection(node.all_input_nodes):
            continue
        if not _stops_gradients(node):
            carries.add(node)
        if not meta.traced_with_grad(node):
            _detach_exits(node)
    for node in graph.nodes:
        meta.forget_grad_enabled(node)


def _stops_gradients(node: fx.Node) -> bool:
    if node.target is aten.detach.default:
        return True
    return meta.is_tensor(node) and not carries_gradient(meta.dtype(node))


def _detach_exits(node: fx.Node) -> None:
    if not meta.is_tensor(node) or not carries_gradient(meta.dtype(node)):
        return
    exits = [user for user in node.users if user.op == "output" or meta.traced_with_grad(user)]
    exits = [user for user in exits if user.target is not aten.detach.default]
    if not exits:
        return
    with node.graph.inserting_after(node):
        detached = node.graph.call_function(aten.detach.default, (node,))
    meta.copy_meta(node, detached, with_value=True)
    for user in exits:
        user.replace_input_with(node, detached)
