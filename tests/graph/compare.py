"""Compare a captured graph with the eager model: loss, outputs, gradients, updated buffers."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from hetu_fx.graph.bind import Batch, input_tensors
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind

Results = dict[tuple[OutputKind, str], torch.Tensor]


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


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def call(model: nn.Module, batch: Batch) -> object:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def assert_close(given: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float, what: str) -> None:
    if given is None or wanted is None:
        assert given is None or not given.any(), what
        assert wanted is None or not wanted.any(), what
        return
    assert given.dtype == wanted.dtype, what
    scale = max(1.0, float(wanted.detach().double().norm()))
    error = float((given.detach().double() - wanted.detach().double()).norm())
    assert error <= tolerance * scale, f"{what}: {error}"


def loss_of(results: Results) -> torch.Tensor:
    return next(value for (kind, _), value in results.items() if kind is OutputKind.LOSS)


def eager_loss(output: object) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]  # type: ignore[index, no-any-return]


def assert_same_as_eager(
    model: nn.Module,
    graph: Graph,
    batch: Batch,
    tolerance: float,
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """Run graph and model with the same random numbers and compare everything."""
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    results = run_on_one_device(graph, model, batch, extra)
    found = gradients(model, loss_of(results))
    torch.manual_seed(1)
    output = call(reference, batch)
    wanted = gradients(reference, eager_loss(output))
    assert_close(loss_of(results), eager_loss(output), tolerance, "loss")
    for name in wanted:
        assert_close(found[name], wanted[name], tolerance, f"gradient of {name}")
    buffers = dict(reference.named_buffers())
    for (kind, name), value in results.items():
        if kind is OutputKind.BUFFER_UPDATE:
            assert_close(value, buffers[name], tolerance, f"buffer {name}")
        elif kind is OutputKind.VALUE and hasattr(output, "keys") and name in output:
            assert_close(value, output[name], tolerance, name)
