"""What the values of nodes are made of: a walk against the direction of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx


def _inputs(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def needed_for(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = _inputs
) -> frozenset[fx.Node]:
    """Return the nodes that these are made of, themselves among them.

    `sources` gives what a node is made of; where it gives nothing the walk ends.
    """
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += sources(node)
    return frozenset(found)
