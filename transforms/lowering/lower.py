"""Lower a device's module to a callable: as it is, or compiled.

Graphs that run as they are call ops by torch's Python bindings, as a model does.

Overloads of `torch.ops` parse their arguments by the schema at each call, which takes 0.8 microseconds more: 0.7 ms in
a forward of 24 layers. A binding takes the same arguments and calls the same op.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch.nn import functional

from hetu_fx import comm_ops
from hetu_fx.base.cpp_library import one_library
from hetu_fx.base.documents import sources_digest
from hetu_fx.base.torch_compile import Symbols, aot_autograd, by_inductor
from hetu_fx.base.torch_private import takes_boxed_arguments
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.transforms import rewrites
from hetu_fx.transforms.lowering.block_modules import BlockModule
from hetu_fx.transforms.lowering.compiled import Compiled, Compiler, compiling
from hetu_fx.transforms.lowering.input_guards import ALL_DIMS, Like, is_number, is_told_by_values
from hetu_fx.transforms.lowering.units import MARKERS

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
        with compiling, self._together():
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
