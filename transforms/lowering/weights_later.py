"""Let the gradients of weights wait for their turn in the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from hetu_fx.graph.calls import operand
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import cuts_backwards
from hetu_fx.transforms.lowering.later_products import LATER_PRODUCTS, later_product
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind

aten = torch.ops.aten

Given = tuple[fx.Node, fx.Node, fx.Node | None]
"""Rows, a weight and maybe a bias."""

_CASTS = frozenset({aten.to.dtype, aten._to_copy.default})


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


def _products(device: DeviceGraph) -> Iterator[tuple[fx.Node, Given]]:
    """Yield the products that take no more than rows, a parameter and maybe a bias, each with these."""
    leaves = zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True)
    weights = {node for node, slot in leaves if slot.kind is SlotKind.PARAMETER}
    for node in device.graph.nodes:
        if node.op != "call_function" or str(node.target) not in LATER_PRODUCTS or node.kwargs:
            continue
        given = _given(node)
        if given is not None and all(one is None or _leaf(one) in weights for one in given[1:]):
            yield node, given


def _given(node: fx.Node) -> Given | None:
    """Return the rows, weight and bias that an op is given; None where it takes more."""
    product, count = LATER_PRODUCTS[str(node.target)], len(node.args)
    if not {product.x, product.weight, product.bias}.issuperset(range(count)):
        return None
    bias = node.args[product.bias] if product.bias is not None and product.bias < count else None
    return operand(node, product.x), operand(node, product.weight), bias if isinstance(bias, fx.Node) else None


def _leaf(node: fx.Node) -> fx.Node:
    """Return what a node is a cast of, or the node."""
    return operand(node) if node.target in _CASTS else node
