"""Match a batch with the inputs of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph.containers import Constant, Opaque, Tree, flatten, walk
from hetu_fx.graph.graph import Graph, LeafKind

Batch = Mapping[str, Any] | tuple[Any, ...]


def as_call(batch: Batch) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a batch as arguments of a call: by keyword, or positional where it is a tuple."""
    return ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})


def flatten_batch(batch: Batch) -> tuple[Tree, dict[str, torch.Tensor]]:
    """Return the structure of a batch and its tensors by input name."""
    return flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))


def check_no_objects(batch: Batch) -> None:
    """Refuse objects whose values no graph follows, and of whose rows nothing is known: caches, arrays, and the like.

    Raises:
        BatchError: the batch has some.
    """
    tree, _ = flatten_batch(batch)
    found = [f"{leaf.name!r} ({leaf.type_name})" for leaf in walk(tree) if isinstance(leaf, Opaque)]
    if found:
        raise BatchError(
            f"the batch has objects that are neither tensors, plain values nor containers of them: {', '.join(found)}; "
            f"pass tensors, and call a model with its cache (past_key_values) inside `with model.hetu.whole():`, as "
            f"model.generate does"
        )


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
