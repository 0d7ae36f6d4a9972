"""Runs one call in a way, forward and backward, and in the reference: the same numbers in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hetu_fx.base.dtypes import carries_gradient, in_double
from hetu_fx.base.torch_private import tree_leaves
from hetu_fx_align.call import Call
from hetu_fx_align.way import Runner

SEED = 0
WIDE = torch.float64
T = TypeVar("T")
Run = Callable[[Call], Any]


@dataclass(frozen=True, eq=False)
class Made:
    """What a call came to.

    Attributes:
        outputs: its tensors.
        gradients: for each tensor of the arguments; None where there is none.
        cotangents: that were given for those outputs that carry gradients, in their dtypes.
    """

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor, ...]


def run_in(runner: Runner, call: Call) -> Made:
    """Run a call in a way, with cotangents drawn by a seed that is always the same."""
    return run_both_ways(runner.run, runner.way.adapt_call(call), None)


def run_both_ways(run: Run, call: Call, cotangents: Sequence[Tensor] | None) -> Made:
    """Run a call forward and backward.

    Args:
        run: what runs it forward.
        call: the call; its tensors get no gradients of their own.
        cotangents: for the outputs that carry gradients; None: normal numbers are drawn. There are no gradients where
            they do not fit the outputs: a way has made other ones.
    """
    tensors = tuple(
        tensor.detach().requires_grad_(wanted and carries_gradient(tensor.dtype))
        for tensor, wanted in zip(call.tensors, call.needs_gradient, strict=True)
    )
    with torch.enable_grad():
        outputs = tuple(leaf for leaf in tree_leaves(run(call.with_tensors(tensors))) if isinstance(leaf, Tensor))
        live = [output for output in outputs if output.requires_grad]
        given = _drawn(live) if cotangents is None else tuple(cotangents)
        gradients = _gradients(live, tensors, given)
    return Made(tuple(output.detach() for output in outputs), gradients, given)


def _drawn(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(SEED)
    return tuple(
        torch.randn(output.shape, generator=source, dtype=in_double(output.dtype)).to(output.device, output.dtype)
        for output in outputs
    )


def _gradients(
    outputs: Sequence[Tensor], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    fits = [output.shape for output in outputs] == [cotangent.shape for cotangent in cotangents]
    if not outputs or not wanted or not fits:
        return (None,) * len(tensors)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in tensors)


def reference_of(call: Call, made: Made) -> tuple[Made, torch.dtype]:
    """Run a call on the numbers that a way has read, in float64 on the cpu, or in float32 where the op has no other.

    Returns what it came to, and the dtype.
    """
    return in_widest(
        lambda dtype: run_both_ways(Call.run, up_cast(call, dtype), [_up(g, dtype) for g in made.cotangents])
    )


def in_widest(run: Callable[[torch.dtype], T]) -> tuple[T, torch.dtype]:
    """Return what `run` comes to in float64, or in float32 where an op has no other, and the dtype."""
    for dtype in (WIDE, torch.float32):
        try:
            return run(dtype), dtype
        except (NotImplementedError, RuntimeError) as error:
            problem = error
    raise problem


def up_cast(call: Call, dtype: torch.dtype) -> Call:
    """Return a call on the cpu in a wider dtype; dtypes among its arguments are widened, too."""

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _up(leaf, dtype)
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return wider(leaf, dtype) if isinstance(leaf, torch.dtype) else leaf

    return Call(call.op, tuple(map(widened, call.leaves)), call.tree, call.needs_gradient)


def _up(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", wider(tensor.dtype, dtype))


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def shaken(tensor: Tensor, share: float, source: torch.Generator) -> Tensor:
    """Return a tensor with every number that is not whole changed by up to so much of it, drawn from `source`."""
    if not carries_gradient(tensor.dtype):
        return tensor
    noise = torch.rand(tensor.shape, generator=source, dtype=WIDE).mul_(2).sub_(1).mul_(share)
    return (tensor * noise.add_(1)).to(tensor.dtype)


def disturbed(call: Call, made: Made, eps: float) -> tuple[Call, tuple[Tensor, ...]]:
    """Return a call and its cotangents with every real number changed by up to half of `eps`, relative to it.

    What a result changes by then is what rounding the arguments alone does to it, which no way of running it avoids.
    """
    source = torch.Generator().manual_seed(SEED + 1)

    def moved(tensor: Tensor) -> Tensor:
        return shaken(tensor, eps / 2, source)

    return call.mapped(moved), tuple(map(moved, made.cotangents))


def wider(dtype: torch.dtype, real: torch.dtype) -> torch.dtype:
    """Return the dtype of the same kind of numbers in the precision of a real dtype."""
    if dtype.is_complex:
        return real.to_complex()
    return real if dtype.is_floating_point else dtype
