"""Lower a device's module to a callable: as it is, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn

from hetu_fx.base.torch_private import aot_autograd, is_boxed
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.transforms.lowering.block_modules import BlockModule

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
    check_backend(backend)
    if backend is None:
        return module.forward
    pieces = {name: child for name, child in module.named_children() if isinstance(child, BlockModule)}
    if not pieces:
        return _compiled(module, backend)
    for name, piece in pieces.items():
        setattr(module, name, _Shared(piece, backend))
    return module.forward


class _Shared(nn.Module):
    """A block's module, compiled once for all who have it."""

    def __init__(self, piece: BlockModule, backend: str | Compiler) -> None:
        super().__init__()
        self._piece = piece  # whoever has it keeps it, for others to find
        if backend not in piece.compiled:
            piece.compiled[backend] = _compiled(piece, backend)
        self._run = piece.compiled[backend]

    def forward(self, *inputs: Any) -> Any:
        """Run it."""
        return self._run(*inputs)


def _compiled(module: fx.GraphModule, backend: str | Compiler) -> Callable[..., Any]:
    if backend == "inductor":
        return torch.compile(module, backend="inductor", dynamic=True)
    if isinstance(backend, str):
        return _aot(module, lambda graph_module, _: graph_module.forward)
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
