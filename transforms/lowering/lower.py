"""Lower a device's module to a callable: as it is, or compiled.

Graphs that run as they are call ops by torch's Python bindings, as a model does.

Overloads of `torch.ops` parse their arguments by the schema at each call, which takes 0.8 microseconds more: 0.7 ms in
a forward of 24 layers. A binding takes the same arguments and calls the same op.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch.nn import functional

from hetu_fx import comm_ops
from hetu_fx.base.documents import sources_digest
from hetu_fx.base.torch_compile import (
    Symbols,
    aot_autograd,
    budget_that_keeps,
    by_inductor,
    compiling,
    insert_checkpointed_call,
    is_compiler_defect,
    keep,
    keep_only,
    memory_budget,
    one_library,
)
from hetu_fx.base.torch_private import takes_boxed_arguments
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.graph.calls import draws
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms import rewrites
from hetu_fx.transforms.lowering.block_modules import BlockModule
from hetu_fx.transforms.lowering.graph_traffic import sends
from hetu_fx.transforms.lowering.input_guards import (
    ALL_DIMS,
    Like,
    OpenDims,
    TensorForm,
    exactly,
    input_form,
    is_number,
    is_told_by_values,
)
from hetu_fx.transforms.lowering.recomputing_module import SAVED, CheckpointedRun, checkpoint_contexts
from hetu_fx.transforms.lowering.units import MARKERS

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""What makes a function of a graph, which it may keep and change, and of inputs to trace it with."""

MOST_KNOWN = 1_000
"""How many different inputs are remembered with what takes them; lengths of sequences make many."""


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
        with compiling.lock:
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
    warn_user(
        f"torch {torch.__version__} fails to compile a part of the model for inputs of shapes {shapes}: {error}. "
        f"For these it runs uncompiled, with the same results\n"
        f"hint: another number of rows per rank and micro-batch may avoid this defect of torch, or compile=None",
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


aten = torch.ops.aten

METHODS: Mapping[Any, str] = {
    aten.contiguous.default: "contiguous",
    aten.expand.default: "expand",
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.to.dtype: "to",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "view",
}
"""Of the first argument."""
FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.gelu.default: functional.gelu,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: functional.linear,
    aten.matmul.default: torch.matmul,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    aten.sub.Tensor: torch.sub,
    aten.tanh.default: torch.tanh,
}


def by_bindings(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module that does the same, and calls bindings where they are known."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in METHODS and isinstance(node.args[0] if node.args else None, fx.Node):
            node.op, node.target = "call_method", METHODS[node.target]
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    return fx.GraphModule(_children_by_bindings(module), graph)


def _children_by_bindings(module: fx.GraphModule) -> dict[str, nn.Module]:
    """Return what a module calls, its blocks so that they call bindings as well."""
    names = dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="call_module"))
    called = {name: module.get_submodule(name) for name in names}
    return {name: by_bindings(child) if isinstance(child, BlockModule) else child for name, child in called.items()}


PairCompiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""What makes a function of a forward or a backward, and of example inputs."""
Backend = str | PairCompiler | None


def check_backend(backend: Backend) -> None:
    """Raise EnvironmentProblem for a backend that `lower` does not know."""
    if not (backend is None or callable(backend) or backend in ("aot_eager", "inductor")):
        raise EnvironmentProblem(
            f"compile={backend!r} is not known"
            f"\nhint: use None, 'aot_eager', 'inductor' or a function of a GraphModule and example inputs"
        )


def lower(module: fx.GraphModule, backend: Backend, fixed: Sequence[bool] = ()) -> Callable[..., Any]:
    """Return a function that runs a device's module as it is, or by functorch's joint graph and a compiler.

    Args:
        module: made by `Checkpoint`, by `BlockModules` if it is compiled, and by both and `Units` if parameters are
            gathered unit by unit.
        backend: None runs the graph eagerly; "aot_eager" partitions the joint graph by min-cut rematerialisation and
            runs both halves eagerly; "inductor" compiles both; a callable compiles each half, given its GraphModule
            and example inputs.
        fixed: which inputs have the same sizes in every step, as parameters have; none, if it does not say.
    """
    check_backend(backend)
    if backend is None:
        return by_bindings(module).forward
    compiler, together = _compiler(backend), one_library if backend == "inductor" else nullcontext
    is_fixed = tuple(fixed) or (False,) * sum(node.op == "placeholder" for node in module.graph.nodes)
    blocks = {name: child for name, child in module.named_children() if isinstance(child, BlockModule)}
    if not blocks:
        return _whole(Compiled(module, compiler), is_fixed)
    for block in blocks.values():
        if backend not in block.compiled:
            block.compiled[backend] = Compiled(block, compiler)
    pieces = {name: BlockCall(block, block.compiled[backend]) for name, block in blocks.items()}
    return CompiledAhead(fx.GraphModule(pieces, module.graph), is_fixed, together)


def _whole(compiled: Compiled, fixed: Sequence[bool]) -> Callable[..., Any]:
    """Return what runs a module that is one piece."""
    open_dims = [() if is_fixed else ALL_DIMS for is_fixed in fixed]
    return lambda *inputs: compiled(inputs, open_dims)


def _compiler(backend: str | PairCompiler) -> Compiler:
    if backend == "inductor":
        return _inductor
    return _aot(_as_it_is if isinstance(backend, str) else backend)


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    with one_library():
        return by_inductor(graph, inputs, _tag())


def _tag() -> str:
    """Return what tells our ops from others of their names: graphs that were compiled have parts of theirs inside."""
    return f"hetu_fx {sources_digest(comm_ops, rewrites)}"


def _as_it_is(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    return module.forward


def _boxed(compiler: PairCompiler) -> PairCompiler:
    """Let compiled functions take their arguments as one list, which they may empty to free memory early."""

    def compile_boxed(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        made = compiler(module, examples)
        boxed: Callable[..., Any] = made if takes_boxed_arguments(made) else make_boxed_func(made)
        return boxed

    return compile_boxed


def _aot(compiler: PairCompiler) -> Compiler:
    """Compile by functorch's joint graph.

    What the partition recomputes in backward is never communication: it keeps the results of ops that it does not know.
    """
    return lambda graph, inputs: aot_autograd(
        fw_compiler=_boxed(compiler),
        bw_compiler=_boxed(compiler),
        partition_fn=min_cut_rematerialization_partition,
    )(graph, inputs)


Together = Callable[[], AbstractContextManager[None]]
"""Around what is compiled together; nothing of it may run before the end."""


class BlockCall(nn.Module):
    """A block's module, compiled for all who have it, where one module calls it."""

    def __init__(self, block: BlockModule, compiled: Compiled) -> None:
        super().__init__()
        self.block, self.compiled = block, compiled  # whoever has a block keeps it, for others to find
        self.open_dims: list[set[int]] = [set() for node in block.graph.nodes if node.op == "placeholder"]

    def forward(self, *inputs: Any) -> Any:
        """Run it."""
        return self.compiled(inputs, self.open_dims)

    def note(self, arguments: Sequence[Any]) -> None:
        """Take note of which sizes of arguments, which are traced, are open."""
        for known, argument in zip(self.open_dims, arguments, strict=True):
            if isinstance(argument, Tensor):
                known |= {d for d, size in enumerate(argument.shape) if isinstance(size, torch.SymInt)}


class CompiledAhead:
    """A module whose pieces are all compiled at the first call of its kind.

    Which sizes are open follows from the module's inputs: what is computed of open sizes is open. Calls with gradients
    and without are of two kinds, and so are sizes of 0 and 1 and larger ones, which compiled graphs differ by. What a
    later call needs besides is compiled when a piece meets it.
    """

    def __init__(self, module: fx.GraphModule, fixed: Sequence[bool], together: Together) -> None:
        self._module, self._fixed, self._together = module, fixed, together
        self._open = tuple(i for i, is_fixed in enumerate(fixed) if not is_fixed)
        self._prepared: set[Hashable] = set()

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        opened = (inputs[i] for i in self._open)
        small = (tuple(size < 2 for size in given.shape) for given in opened if isinstance(given, Tensor))
        kind = torch.is_grad_enabled(), *small
        if kind not in self._prepared:
            self._prepare(inputs)
            self._prepared.add(kind)
        return self._module.forward(*inputs)

    def _prepare(self, inputs: Sequence[Any]) -> None:
        calls = list(_calls(self._module, inputs, self._fixed))  # all, as each says what is open
        with compiling.lock, self._together():
            for piece, likes in calls:
                if not any(map(is_told_by_values, likes)):
                    piece.compiled.find_compiled(likes, piece.open_dims)


def _calls(
    module: fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[bool]
) -> Iterator[tuple[BlockCall, list[Any]]]:
    """Yield every call of a piece, with what its inputs are like."""
    symbols, given = Symbols(), zip(inputs, fixed, strict=True)
    values, known = dict[fx.Node, Any](), dict[Hashable, Any]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = _traced(symbols, *next(given))
        elif node.op == "call_function":
            _, act = MARKERS.get(node.target, ("", node.target))  # of others there is getitem alone
            values[node] = act(*fx.map_arg(node.args, values.get))
        elif node.op == "call_module":
            piece, arguments = (
                cast(BlockCall, module.get_submodule(str(node.target))),
                fx.map_arg(node.args, values.get),
            )
            likes = [Like.of(argument) for argument in arguments]
            key = (piece, *zip(likes, map(_text, arguments), strict=True))
            if key not in known:
                known[key] = symbols.run(piece.block, arguments)
            values[node] = known[key]
            piece.note(arguments)
            yield piece, likes


def _traced(symbols: Symbols, given: Any, is_fixed: bool) -> Any:
    like = Like.of(given)
    if isinstance(like, Like):
        return like.form(() if is_fixed else range(len(like.sizes))).traced(symbols, like)
    return symbols.number(like) if is_number(like) and not is_fixed else like


def _text(argument: Any) -> str:
    """Return what tells open sizes and numbers from each other."""
    return str(tuple(argument.shape)) if isinstance(argument, Tensor) else str(argument)
