"""Match a batch and a model with the leaves of a graph, and run the graph on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph.containers import Constant, Opaque, Tree, flatten, walk
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind

Batch = Mapping[str, Any] | tuple[Any, ...]


def input_tensors(graph: Graph, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by input name.

    Raises:
        BatchError: the batch has other keys, or other values that are baked in, than the captured one.
    """
    tree, tensors = flatten(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
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


def _opaque_inputs(graph: Graph) -> tuple[str, ...]:
    """Return the names of baked-in inputs whose values are not compared."""
    return tuple(leaf.name for leaf in walk(graph.input_tree) if isinstance(leaf, Opaque))


def leaf_values(
    graph: Graph, model: torch.nn.Module, batch: Batch, extra: Mapping[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Return a value for every leaf of the graph, in order.

    Args:
        model: holds the parameters and buffers.
        batch: a batch like the captured one.
        extra: values of leaves that passes added (counts, random state), by name.
    """
    inputs = input_tensors(graph, batch)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def value(leaf: Leaf) -> torch.Tensor:
        match leaf.kind:
            case LeafKind.INPUT:
                return inputs[leaf.name]
            case LeafKind.PARAMETER | LeafKind.BUFFER:
                return state[leaf.name]
            case LeafKind.CONSTANT:
                return graph.constants[leaf.name]
            case LeafKind.COUNT | LeafKind.RANDOM_STATE:
                return (extra or {})[leaf.name]

    return [value(leaf) for leaf in graph.leaves]


def run_on_one_device(
    graph: Graph, model: torch.nn.Module, batch: Batch, extra: Mapping[str, torch.Tensor] | None = None
) -> dict[tuple[OutputKind, str], torch.Tensor]:
    """Run the graph as it is; return every output by (kind, name). Buffers of the model are not changed."""
    results = graph.module()(*leaf_values(graph, model, batch, extra))
    return {(leaf.kind, leaf.name): value for leaf, value in zip(graph.outputs, results, strict=True)}
