"""Items: nodes that take one tensor out of an op with several results."""

from __future__ import annotations

import operator

from torch import fx

from hetu_fx.graph import meta


def is_item(node: fx.Node) -> bool:
    """Tell whether the node takes one tensor out of an op with several results."""
    return node.op == "call_function" and node.target is operator.getitem and meta.is_tensor(node)


def whole_of(item: fx.Node) -> fx.Node:
    """Return the op that an item is one result of."""
    whole = item.args[0]
    assert isinstance(whole, fx.Node)
    return whole
