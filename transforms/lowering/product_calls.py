"""The products with a weight in a device's graph: what they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS, PRODUCTS_BY_NAME
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand

aten = torch.ops.aten

CASTS = frozenset({aten.to.dtype, aten._to_copy.default})

Given = tuple[fx.Node, fx.Node, fx.Node | None]
"""Rows, a weight and maybe a bias."""


def product_operands(node: fx.Node) -> Given | None:
    """Return the rows, weight and bias that a product takes; None where it takes more, and for any other op.

    A bias of more than one dim has rows of its own: its gradient is no sum over all rows.
    """
    product, count = PRODUCTS_BY_NAME.get(str(node.target)), len(node.args)
    if product is None or product.of_input is None or node.op != "call_function" or node.kwargs:
        return None
    if not {product.x, product.weight, product.bias}.issuperset(range(count)):
        return None
    bias = node.args[product.bias] if product.bias is not None and product.bias < count else None
    if isinstance(bias, fx.Node) and meta.num_dims(bias) not in (0, 1):
        return None
    return operand(node, product.x), operand(node, product.weight), bias if isinstance(bias, fx.Node) else None


def product_call(name: str, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return the product of a name and what it takes of these, in its order: what `product_operands` has read."""
    op, product = next((op, product) for op, product in PRODUCTS.items() if str(op) == name)
    places = (product.x, x), (product.weight, weight), (product.bias, bias)
    given = {place: one for place, one in places if place is not None and one is not None}
    return op, tuple(given[place] for place in sorted(given))


def uncast(node: fx.Node) -> fx.Node:
    """Return what a node is a cast of, or the node."""
    return operand(node) if node.target in CASTS else node
