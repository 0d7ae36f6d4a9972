"""Lower a device's module to a callable: as it is, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx

from hetu_fx.base.torch_private import aot_autograd, is_boxed
from hetu_fx.errors import EnvironmentProblem

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Backend = str | Compiler | None


def check_backend(backend: Backend) -> None:
    """Raise EnvironmentProblem for a backend that `lower` does not know."""
    if not (backend is None or callable(backend) or backend in ("aot_eager", "inductor")):
        raise EnvironmentProblem(
            f"compile={backend!r} is not known; use None, 'aot_eager', 'inductor' or a function of a GraphModule and "
            f"example inputs"
        )


def lower(module: fx.GraphModule, backend: Backend) -> Callable[..., Any]:
    """Return a function that runs a device's module as it is, or by functorch's joint graph and a compiler.

    Args:
        module: made by `Checkpoint`.
        backend: None runs the graph eagerly; "aot_eager" partitions the joint graph by min-cut rematerialisation and
            runs both halves eagerly; "inductor" compiles with torch.compile; a callable compiles each half, given
            its GraphModule and example inputs.
    """
    if backend is None:
        return module.forward
    if backend == "inductor":
        return torch.compile(module, backend="inductor", dynamic=True)
    if backend == "aot_eager":
        return _aot(module, lambda graph_module, _: graph_module.forward)
    check_backend(backend)
    assert callable(backend)
    return _aot(module, backend)


def _boxed(compiler: Compiler) -> Compiler:
    """Let compiled functions take their arguments as one list, which they may empty to free memory early."""

    def compile_boxed(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        made = compiler(module, examples)
        boxed: Callable[..., Any] = made if is_boxed(made) else make_boxed_func(made)
        return boxed

    return compile_boxed


def _aot(module: fx.GraphModule, compiler: Compiler) -> Callable[..., Any]:
    """Compile by functorch's joint graph, anew where sizes of 1, grad mode or leaves that want gradients change.

    What the partition recomputes in backward is never communication: it keeps the results of ops that it does not know.
    """
    backend = aot_autograd(
        fw_compiler=_boxed(compiler),
        bw_compiler=_boxed(compiler),
        partition_fn=min_cut_rematerialization_partition,
    )
    return torch.compile(module, backend=backend, dynamic=True)
