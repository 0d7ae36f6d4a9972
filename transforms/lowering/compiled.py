"""A graph compiled for the inputs that it meets: once for all that have as much in common as it takes."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hetu_fx.base.torch_compile import (
    Symbols,
    budget_that_keeps,
    insert_checkpointed_call,
    is_compiler_defect,
    keep,
    keep_only,
    memory_budget,
)
from hetu_fx.graph.calls import draws
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms.lowering.graph_traffic import sends
from hetu_fx.transforms.lowering.input_guards import Like, OpenDims, TensorForm, exactly, input_form, is_number
from hetu_fx.transforms.lowering.recomputing_module import SAVED, CheckpointedRun, checkpoint_contexts

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""What makes a function of a graph, which it may keep and change, and of inputs to trace it with."""

MOST_KNOWN = 1_000
"""How many different inputs are remembered with what takes them; lengths of sequences make many."""

compiling = threading.RLock()
"""Where ranks are threads, one compiles at a time, and finds what another has compiled."""


class Compiled:
    """A graph that is compiled when it meets inputs that nothing takes that it was compiled to.

    That is anew where dtypes, closed sizes, sizes of 0 or 1, orders of strides, what needs gradients, or the mode of
    gradients differ, and where sizes break what was found out of them while the graph was traced.
    """

    def __init__(self, module: fx.GraphModule, compiler: Compiler) -> None:
        self._module, self._compiler = module, compiler
        self._calls: dict[Hashable, tuple[_Variant, tuple[int, ...]]] = {}
        self._variants: dict[Hashable, list[_Variant]] = {}

    def __call__(self, inputs: Sequence[Any], open_dims: Sequence[OpenDims]) -> Any:
        """Run it. `open_dims` of each input are those that may have other sizes in other calls."""
        key = (_surroundings(), *exactly(inputs))
        call = self._calls.get(key)
        if call is None:
            call = self._call(key, inputs, open_dims)
        variant, loose = call
        if loose:
            inputs = [given.contiguous() if i in loose else given for i, given in enumerate(inputs)]
        return variant(inputs)

    def find_compiled(self, likes: Sequence[Any], open_dims: Sequence[OpenDims]) -> _Variant:
        """Return what it was compiled to for inputs like these; compile it if there is nothing."""
        forms = tuple(input_form(like, dims) for like, dims in zip(likes, open_dims, strict=True))
        with compiling:
            variants = self._variants.setdefault((_surroundings(), *forms), [])
            found = next((variant for variant in variants if variant.takes(likes)), None)
            if found is None:
                found = _variant(self._module, self._compiler, likes, forms)
                variants.append(found)
            return found

    def _call(
        self, key: Hashable, inputs: Sequence[Any], open_dims: Sequence[OpenDims]
    ) -> tuple[_Variant, tuple[int, ...]]:
        likes = [Like.of(given) for given in inputs]
        loose = tuple(i for i, like in enumerate(likes) if isinstance(like, Like) and not like.is_dense)
        if len(self._calls) >= MOST_KNOWN:
            self._calls.clear()
        call = self._calls[key] = self.find_compiled(likes, open_dims), loose
        return call


@dataclass(frozen=True)
class _Variant:
    """What a graph was compiled to.

    Attributes:
        run: takes open sizes and then inputs.
        sizes: the open sizes: of which input, which dim.
        given: inputs that it takes; others are part of it.
        numbers: those of them that are numbers.
        condition: tells of open sizes and numbers whether it holds for them.
    """

    run: Callable[..., Any]
    sizes: tuple[tuple[int, int], ...]
    given: tuple[int, ...]
    numbers: tuple[int, ...]
    condition: Callable[[Sequence[int]], bool]

    def takes(self, likes: Sequence[Any]) -> bool:
        """Tell whether it holds for these inputs, which are of its forms."""
        return self.condition([*(likes[i].sizes[d] for i, d in self.sizes), *(likes[i] for i in self.numbers)])

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run it."""
        return self.run(*(inputs[i].shape[d] for i, d in self.sizes), *(inputs[i] for i in self.given))


def _variant(module: fx.GraphModule, compiler: Compiler, likes: Sequence[Any], forms: Sequence[Hashable]) -> _Variant:
    """Return what a graph was compiled to: for open sizes, or, where torch fails at these, for the sizes of `likes`.

    Where it fails at these too, the graph runs as it is, with a warning.
    """
    error: Exception | None = None
    is_open = any(isinstance(form, TensorForm) and None in form.sizes for form in forms)
    for closed in (False, True)[: 1 + is_open]:
        try:
            return _compiled(module, compiler, likes, forms, closed)
        except Exception as one:
            if not is_compiler_defect(one):
                raise
            error = one
    return _uncompiled(module, likes, error)


def _compiled(
    module: fx.GraphModule, compiler: Compiler, likes: Sequence[Any], forms: Sequence[Hashable], closed: bool
) -> _Variant:
    symbols, traced = Symbols(), dict[int, Any]()
    for i, (like, form) in enumerate(zip(likes, forms, strict=True)):
        if isinstance(form, TensorForm):
            traced[i] = (like.form(()) if closed else form).traced(symbols, like)
        elif is_number(like):
            traced[i] = symbols.number(like)
    sizes = tuple((i, d) for i, form in enumerate(forms) if isinstance(form, TensorForm) for d in form.open_dims)
    numbers = tuple(i for i in traced if is_number(likes[i]))
    opened = [traced[i].shape[d] for i, d in sizes]
    inputs = [*([] if closed else opened), *traced.values()]
    graph = _graph(module, len(inputs) - len(traced), {i: like for i, like in enumerate(likes) if i not in traced})
    with symbols.tracing(), budget_that_keeps(any(map(draws, graph.graph.nodes))):
        run = compiler(graph, inputs)
    condition = symbols.condition([x for x in inputs if is_number(x)])
    if closed:
        return _Variant(
            lambda *given: run(*given[len(sizes) :]),
            sizes,
            tuple(traced),
            numbers,
            functools.partial(_holds_at, tuple(opened), condition),
        )
    return _Variant(run, sizes, tuple(traced), numbers, condition)


def _holds_at(sizes: tuple[int, ...], condition: Callable[[Sequence[int]], bool], values: Sequence[int]) -> bool:
    """Tell whether open sizes are these, and what was found out of the numbers after them holds."""
    return tuple(values[: len(sizes)]) == sizes and condition(values[len(sizes) :])


def _uncompiled(module: fx.GraphModule, likes: Sequence[Any], error: Exception | None) -> _Variant:
    """Return what runs a graph as it is, for inputs of the forms for which torch fails to compile it; say so."""
    shapes = ", ".join(sorted({str(like.sizes) for like in likes if isinstance(like, Like)}))
    warnings.warn(
        f"torch {torch.__version__} fails to compile a part of the model for inputs of shapes {shapes}: {error}. "
        f"For these it runs uncompiled, with the same results\n"
        f"hint: another number of rows per rank and micro-batch may avoid this defect of torch, or compile=None",
        stacklevel=2,
    )
    return _Variant(module.forward, (), tuple(range(len(likes))), (), lambda numbers: True)


def _surroundings() -> Hashable:
    """Return what else compiled graphs depend on; they run without autocast."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.is_grad_enabled(), torch.get_num_threads(), deterministic, memory_budget()


def _graph(module: fx.GraphModule, num_sizes: int, constants: Mapping[int, Any]) -> fx.GraphModule:
    """Return a graph as compilers want it: open sizes are its first inputs, which backwards find there."""
    graph, root = fx.Graph(), nn.Module()
    for number in range(num_sizes):
        graph.placeholder(f"size_{number}")
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = {inputs[i]: constant for i, constant in constants.items()}
    for node in module.graph.nodes:
        if node in values:
            continue
        if node.op == "call_module" and isinstance(run := module.get_submodule(str(node.target)), CheckpointedRun):
            root.add_module(str(node.target), _body(run))
            body = graph.get_attr(str(node.target))
            values[node] = insert_checkpointed_call(graph, body, fx.map_arg(node.args, values.__getitem__))
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
            if sends(node):
                keep(values[node])
    return fx.GraphModule(root, graph)


def _body(run: CheckpointedRun) -> fx.GraphModule:
    body = fx.GraphModule(nn.Module(), copy.deepcopy(run.body.graph))
    if run.ops != "all":
        keep_only(body, checkpoint_contexts(run.ops), _name(run.ops))
    return body


def _name(ops: RecomputedOps) -> str:
    """Return what tells by content what a run keeps."""
    return f"hetu_fx keeps {sorted(map(str, SAVED[ops]))}"
