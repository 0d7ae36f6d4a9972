"""What we use of torch's compilers: graphs whose inputs are known are handed to them without Dynamo.

Dynamo finds out what a Python function does; of our graphs that is known. Without it, a graph that was compiled before
is ready in hundredths of a second (what was made is found by content, in inductor's own cache), and nothing is asked at
each call but what we ask. Built on private parts of torch: `hetu_fx.base.torch_private` says how these are held.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from hetu_fx.base.torch_private import FakeTensorMode, keeping_sizes, new_size

Compiled = Callable[..., Any]


class Symbols:
    """Inputs to trace a graph with: sizes that are open, and tensors of them that have no numbers."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self._names = (f"open_{number}" for number in itertools.count())

    def size(self, example: int) -> torch.SymInt:
        """Return an open size of at least 2: 0 and 1 are what graphs differ by."""
        return cast(torch.SymInt, new_size(self._mode, next(self._names), example))

    def number(self, example: int) -> torch.SymInt:
        """Return an open number, whatever it is."""
        source = ConstantSource(next(self._names))
        symbol = self._environment.create_symbol(
            example, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        return cast(torch.SymInt, self._environment.create_symintnode(symbol, hint=example, source=source))

    def tensor(self, sizes: Sequence[Any], strides: Sequence[Any], requires_grad: bool, **options: Any) -> Tensor:
        """Return a tensor without numbers."""
        with self._mode:
            return torch.empty_strided(sizes, strides, **options).requires_grad_(requires_grad)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return what a graph makes of such inputs."""
        with self._mode, keeping_sizes():
            return fx.Interpreter(module).run(*inputs)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace graphs of such inputs inside."""
        with tracing(TracingContext(self._mode)):
            yield

    def condition(self, numbers: Sequence[torch.SymInt]) -> Callable[[Sequence[int]], bool]:
        """Return what tells of values of these open numbers whether what was found out while tracing holds for them."""
        text = self._environment.produce_guards_expression(list(numbers))
        if not text:
            return lambda values: True
        return functools.partial(self._environment.evaluate_guards_expression, text)


LEAST_BUDGET = 1e-9
"""What stands for a memory budget of 0, for which torch computes again also what is marked to be kept."""


def memory_budget() -> float:
    """Return how much of what backwards keep at most is kept, as torch is told to compile: 1 for all, 0 for inputs."""
    return float(torch._functorch.config.activation_memory_budget)


@contextmanager
def budget_that_keeps(draws: bool) -> Iterator[None]:
    """Let torch compile inside such that nothing that is marked (`keep`) or drawn is made twice."""
    budget = 1.0 if draws else max(memory_budget(), LEAST_BUDGET)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        yield


def keep(node: fx.Node) -> None:
    """Mark what an op makes in forward to be kept if backward reads it, and never to be made again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def by_inductor(module: fx.GraphModule, inputs: Sequence[Any], tag: str = "") -> Compiled:
    """Compile a graph, which is taken over, and its backward, at once: kept apart from those of other tags."""
    from torch._inductor.compile_fx import compile_fx  # seconds, where nothing is compiled

    config: Any = torch.compiler.config
    key = f"{config.cache_key_tag} {tag}".strip()
    at_once: Any = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with at_once, config.patch(cache_key_tag=key):
        return cast(Compiled, compile_fx(module, list(inputs)))


def is_compiler_defect(error: Exception) -> bool:
    """Tell whether torch could not compile a graph that is right, by a defect of its own; not for want of a compiler.

    Two are known: torch 2.14.1 cannot part forward and backward of a checkpointed block of one row, and 2.13 compares
    sizes that are open where it sorts strides.
    """
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    if isinstance(error, InductorError):
        return not isinstance(error.inner_exception, (InvalidCxxCompiler, CppCompileError, ImportError, OSError))
    return isinstance(error, AssertionError) and str(error).endswith("was invalid, but is output")


def aot_autograd(**compilers: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return what compiles a graph and its backward by what compiles forwards and backwards of joint graphs."""
    from torch._dynamo.backends.common import aot_autograd  # seconds, where nothing is compiled

    made: Callable[[fx.GraphModule, Sequence[Any]], Compiled] = aot_autograd(**compilers)
    return made


def insert_checkpointed_call(graph: fx.Graph, body: fx.Node, inputs: Sequence[fx.Node]) -> fx.Node:
    """Add the call of a body, a graph module's, that is to be run again in backward."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return graph.call_function(tag_activation_checkpoint, (body, *inputs))


def keep_only(body: fx.GraphModule, contexts: Callable[[], Any], name: str) -> None:
    """Let contexts of torch.utils.checkpoint say what of a body that is run again is kept; caches see the name."""
    contexts = functools.partial(contexts)
    contexts.cache_hash = name  # type: ignore[attr-defined]
    body.meta["_checkpoint_context_fn"] = contexts
