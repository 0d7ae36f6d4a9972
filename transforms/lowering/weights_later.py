"""Let the gradients of weights wait for their turn in the schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import cuts_backwards
from hetu_fx.transforms.lowering.later_products import later_product
from hetu_fx.transforms.lowering.product_calls import Given, product_call, product_operands, uncast
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind


@dataclass(frozen=True)
class WeightsLater:
    """Cut the backward of products in two, where the schedule has both halves; changes the graph in place.

    Requires: a device graph.
    Ensures: products of rows with a parameter hand the making of its gradient to what the graph is fed with as `later`.

        %y = aten.linear(%x, %w, %b)    ->      %y = later_product(%later, 'aten.linear.default', %x, %w, %b)
    """

    schedule: Schedule
    name: ClassVar[str] = "weights_later"

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        found = tuple(_products(device)) if cuts_backwards(self.schedule) else ()
        if not found:
            return device
        slot = GraphSlot(SlotKind.LATER, "later")  # as engines feed it
        *_, last = device.graph.find_nodes(op="placeholder")
        with device.graph.inserting_after(last):
            later = device.graph.placeholder(slot.name)
        for node, given in found:
            node.args = (later, str(node.target), *given)
            node.kwargs, node.target = {}, later_product
        return replace(device, slots=(*device.slots, slot))


def without_waiting(device: DeviceGraph) -> DeviceGraph:
    """Return the graph as it was before `WeightsLater`: one that makes all gradients itself, for who has no schedule.

    It is a copy, of which no run is recomputed, or the graph itself where no product waits.
    """
    slots = tuple(slot for slot in device.slots if slot.kind is not SlotKind.LATER)
    if len(slots) == len(device.slots):
        return device
    graph = copy.deepcopy(device.graph)
    for node in graph.find_nodes(op="call_function", target=later_product):
        node.target, node.args = product_call(*node.args[1:])
    places = zip(graph.find_nodes(op="placeholder"), device.slots, strict=True)
    graph.erase_node(next(node for node, slot in places if slot.kind is SlotKind.LATER))
    return replace(device, graph=graph, slots=slots, recomputed=(), differentiable=frozenset())


def _products(device: DeviceGraph) -> Iterator[tuple[fx.Node, Given]]:
    """Yield the products that take no more than rows, a parameter and maybe a bias, each with these."""
    leaves = zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True)
    weights = {node for node, slot in leaves if slot.kind is SlotKind.PARAMETER}
    for node in device.graph.nodes:
        given = product_operands(node)
        if given is not None and all(one is None or _has_its_own(one, weights) for one in given[1:]):
            yield node, given


def _has_its_own(end: fx.Node, weights: set[fx.Node]) -> bool:
    """Tell whether the gradient of an end is a parameter's, or nobody's: of a bias that another device adds."""
    return uncast(end) in weights or end.target is torch.ops.aten.fill.Scalar
