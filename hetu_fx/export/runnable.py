"""Make a `.pt2` of a graph: called by names, with results by name, and with a model's state inside under its names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.base.torch_private import detect_fake_mode, drop_traced_inputs
from hetu_fx.errors import ExportError
from hetu_fx.graph import meta
from hetu_fx.graph.capture import tracing
from hetu_fx.graph.containers import (
    Constant,
    Entries,
    Items,
    Opaque,
    Passed,
    TensorSlot,
    Tree,
    flatten,
    unflatten,
    walk,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Argument:
    """A placeholder that the caller gives: the name of a tensor in the batch, and its sizes in the example."""

    name: str
    node: fx.Node
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateSlot:
    """A placeholder that the file brings along.

    A tied parameter has the first of its names, as in named_parameters(). What is not `is_saved` is in no state dict.
    """

    name: str
    node: fx.Node
    shape: tuple[int, ...]
    is_parameter: bool
    is_trained: bool = False
    is_saved: bool = True


Place = Argument | StateSlot


@dataclass(frozen=True)
class Result:
    """A value that the graph makes: an output of this name, or the new value of the buffer of this name."""

    name: str
    is_update: bool = False


@dataclass(frozen=True)
class Runnable:
    """A graph, and what is around it.

    Attributes:
        graph: its placeholders are `places`, in order, its flat outputs `results`.
        batch: structure of the arguments: a dict by keyword, or a tuple.
    """

    graph: fx.Graph
    places: tuple[Place, ...]
    results: tuple[Result, ...]
    batch: Tree

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Return the places that the caller fills."""
        return tuple(place for place in self.places if isinstance(place, Argument))

    @property
    def states(self) -> tuple[StateSlot, ...]:
        """Return the places that the file fills."""
        return tuple(place for place in self.places if isinstance(place, StateSlot))


def plain_tree(tree: Tree, names: frozenset[str]) -> Tree:
    """Return the structure of a batch in plain containers, without entries that hold none of these tensors."""
    match tree:
        case Entries(_, keys, children):
            kept = [pair for pair in zip(keys, children, strict=True) if _holds(pair[1], names)]
            return Entries(dict, tuple(key for key, _ in kept), tuple(plain_tree(c, names) for _, c in kept))
        case Items(kind, children):
            plain = list if issubclass(kind, list) else tuple
            return Items(plain, tuple(plain_tree(child, names) for child in children))
        case Opaque(name) | Passed(name):
            return Constant(name, None)
        case leaf:
            return leaf


def _holds(tree: Tree, names: frozenset[str]) -> bool:
    return any(isinstance(leaf, TensorSlot) and leaf.name in names for leaf in walk(tree))


def export_runnable(runnable: Runnable, values: Mapping[str, Tensor], where: str) -> torch.export.ExportedProgram:
    """Export a graph for the cpu, with open sizes open.

    Args:
        runnable: the graph.
        values: of its state, by name; a parameter that is not among them is on the meta device in the file.
        where: what the graph is of, for errors.

    Raises:
        ExportError: torch cannot export it.
    """
    module = _module(runnable, values)
    examples = {arg.name: torch.zeros(arg.shape, dtype=meta.dtype(arg.node)) for arg in runnable.arguments}
    dims = {arg.name: _open_dims(arg.node) for arg in runnable.arguments}
    args, kwargs = _as_call(unflatten(runnable.batch, examples))
    dynamic_args, dynamic_kwargs = _as_call(unflatten(_blank(runnable.batch), dims))
    dynamic = (*dynamic_args, *dynamic_kwargs.values()) if args else dynamic_kwargs
    try:
        with torch.inference_mode(False), tracing():
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise ExportError(f"{where} cannot be exported: {type(error).__name__}: {error}") from error
    drop_traced_inputs(detect_fake_mode([node.meta.get("val") for node in exported.graph.nodes]))
    for node in exported.graph.nodes:
        meta.forget_traces(node)
    exported.example_inputs = None
    _fill(exported, runnable, values)
    return exported


def _as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), batch) if isinstance(batch, dict) else (tuple(batch), {})


def _blank(tree: Tree) -> Tree:
    """Return the tree with None for every plain value, as dynamic shapes are told."""
    match tree:
        case Entries(kind, keys, children):
            return Entries(kind, keys, tuple(map(_blank, children)))
        case Items(kind, children):
            return Items(kind, tuple(map(_blank, children)))
        case Constant(name, _):
            return Constant(name, None)
        case leaf:
            return leaf


def _open_dims(node: fx.Node) -> dict[int, Any]:
    return {i: torch.export.Dim.AUTO for i, size in enumerate(meta.shape(node)) if meta.is_symbolic(size)}


def open_sizes(node: fx.Node) -> list[str | int]:
    """Return the sizes of a value: a number where it is fixed, a name where it is open."""
    sizes = [meta.expression(size) for size in meta.shape(node)]
    return [int(size) if isinstance(size, int) or size.is_number else str(size) for size in sizes]


def _module(runnable: Runnable, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a module with the model's names that runs the graph; parameters have no values yet."""
    module = nn.Module()
    updated = {result.name for result in runnable.results if result.is_update}
    slots = [
        _hold(module, place, values, place.name in updated) if isinstance(place, StateSlot) else place.name
        for place in runnable.places
    ]
    run = fx.GraphModule(nn.Module(), _on_cpu(runnable.graph))

    def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        given = flatten(kwargs or args)[1]
        held = [given[slot] if isinstance(slot, str) else slot() for slot in slots]
        outputs = run(*held)
        updates = zip(runnable.results, outputs, strict=True)
        for result, value in updates:
            if result.is_update:
                module.get_buffer(result.name).copy_(value)
        return {r.name: value for r, value in zip(runnable.results, outputs, strict=True) if not r.is_update}

    forward.__signature__ = _signature(runnable.batch)  # type: ignore[attr-defined]
    module.forward = forward
    return module


def _signature(batch: Tree) -> inspect.Signature:
    assert isinstance(batch, Entries | Items)
    kind = inspect.Parameter
    if isinstance(batch, Entries):
        return inspect.Signature([kind(str(key), kind.KEYWORD_ONLY) for key in batch.keys])
    return inspect.Signature([kind(f"arg{i}", kind.POSITIONAL_ONLY) for i in range(len(batch.children))])


def _hold(module: nn.Module, state: StateSlot, values: Mapping[str, Tensor], is_updated: bool) -> Callable[[], Tensor]:
    """Put a tensor in the module under its name; returns what gives it.

    Of a buffer that the graph writes at its end, backward may need what was read: that is a copy.
    """
    path, _, key = state.name.rpartition(".")
    owner = _submodule(module, path)
    if state.is_parameter:
        owner.register_parameter(key, _stand_in(state))
    else:
        owner.register_buffer(key, values[state.name], persistent=state.is_saved)
    return lambda: getattr(owner, key).clone() if is_updated else getattr(owner, key)


def _submodule(module: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def _stand_in(state: StateSlot) -> nn.Parameter:
    """Return a parameter without values; memory that is not touched is not taken."""
    return nn.Parameter(torch.empty(state.shape, dtype=meta.dtype(state.node)), requires_grad=state.is_trained)


def _fill(exported: torch.export.ExportedProgram, runnable: Runnable, values: Mapping[str, Tensor]) -> None:
    """Put the parameters' values in the place of what was traced with."""
    for state in runnable.states:
        if state.is_parameter:
            known = values.get(state.name)
            tensor = torch.empty(state.shape, dtype=meta.dtype(state.node), device="meta") if known is None else known
            exported.state_dict[state.name] = nn.Parameter(tensor, requires_grad=state.is_trained)


def _on_cpu(graph: fx.Graph) -> fx.Graph:
    """Return a copy that makes its tensors on the cpu, wherever it was captured."""
    fresh = fx.Graph()
    fresh.output(fresh.graph_copy(graph, {}))
    for node in fresh.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _cpu_for_device)
    return fresh


def _cpu_for_device(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) and argument.type != "meta" else argument
