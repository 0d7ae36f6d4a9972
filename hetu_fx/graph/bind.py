"""Match a batch with the inputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph.containers import Constant, Tree, flatten, walk
from hetu_fx.graph.graph import Graph, LeafKind

Batch = Mapping[str, Any] | tuple[Any, ...]


def as_call(batch: Batch) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a batch as arguments of a call: by keyword, or positional where it is a tuple."""
    return ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})


def flatten_batch(batch: Batch) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Return the structure of a batch and its tensors by input name."""
    return flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))


def input_tensors(graph: Graph, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by input name.

    Raises:
        BatchError: the batch has other keys, or other values that are baked in, than the captured one.
    """
    tree, tensors = flatten_batch(batch)
    wanted = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    if set(tensors) != wanted:
        raise BatchError(
            f"the batch has tensors {sorted(tensors)}, the captured graph takes {sorted(wanted)}; "
            "capture the model again with such a batch"
        )
    _check_constants(graph.input_tree, tree)
    return tensors


def _check_constants(captured: Tree, given: Tree) -> None:
    before = {leaf.name: leaf.value for leaf in walk(captured) if isinstance(leaf, Constant)}
    now = {leaf.name: leaf.value for leaf in walk(given) if isinstance(leaf, Constant)}
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise BatchError(
                f"batch entry {name!r} is {now.get(name)!r}, but {before.get(name)!r} is baked into the "
                "captured graph; pass it as a tensor, or capture the model again"
            )
