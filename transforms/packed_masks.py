"""Whether an attention mask keeps the sequences of a packed row apart: found by making it for such a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.graph import meta
from hetu_fx.graph.ancestors import needed_for
from hetu_fx.graph.graph import Graph, Leaf, LeafKind

_HIDDEN = -1e4  # what is added to the score of a token that is not seen, or less


def keeps_apart(graph: Graph, mask: fx.Node, positions: str) -> bool:
    """Tell whether no token sees one of another sequence under the mask; False where that cannot be told.

    Two sequences are laid into each row of the example's length, all else being ones. `positions` is the input of
    position ids.
    """
    needed = needed_for([mask])
    inputs = {leaf.node: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    others = {node for node in needed if node.op in ("placeholder", "get_attr")} - inputs.keys()
    (length,) = {meta.hints(leaf.node)[-1] for leaf in inputs.values() if leaf.name == positions}
    if others or length < 2:
        return False
    first = length // 2
    values = {node: _value(leaf, positions, first) for node, leaf in inputs.items() if node in needed}
    sees = _run(graph, needed, values)[mask]
    sees = sees if sees.dtype == torch.bool else sees > _HIDDEN
    across = sees[..., :first, first:], sees[..., first:, :first]
    return sees.shape[-2:] == (length, length) and not any(part.any() for part in across)


def _value(leaf: Leaf, positions: str, first: int) -> Tensor:
    """Return an input of the example's shape: ones, or the position ids of two sequences."""
    like = meta.value(leaf.node)
    ones = torch.ones(meta.hints(leaf.node), dtype=like.dtype)
    if leaf.name != positions:
        return ones
    counted = torch.arange(ones.shape[-1])
    return torch.where(counted < first, counted, counted - first).to(like.dtype).expand_as(ones).contiguous()


def _run(graph: Graph, needed: frozenset[fx.Node], values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Run the ops that are needed, on the CPU; return all values."""
    for node in graph.graph.nodes:
        if node in needed and node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            place = {"device": torch.device("cpu")} if "device" in kwargs else {}
            values[node] = node.target(*args, **(kwargs | place))
    return values
