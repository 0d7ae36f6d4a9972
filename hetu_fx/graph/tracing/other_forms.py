"""Functions of torch, and `len`, which a trace has another form of: one that leaves sizes open and reads no numbers.

- `len(x)` of a tensor, of which Python makes an int, and chunks of a size that is a multiple of their number, which
  torch counts: both fix a size that a trace could leave open.
- Batch norms that average their statistics over all batches (`momentum=None`) weigh each by one over their number,
  which torch reads as a Python float; here it stays a tensor.
- `torch.distributions` asks whether a covariance is symmetric, and only then whether it is positive definite: a trace
  would have to go on either way. All is asked here, and the answer is the same.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from hetu_fx.base.torch_private import BatchNorm, check_input_of_norm, statically_known_true

_LEN, _CHUNK, _NORM = builtins.len, torch.chunk, BatchNorm.forward


def _length(value: Any, /) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else _LEN(value)


def _chunks(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    size = input.shape[dim]
    if isinstance(size, int) or not statically_known_true(size % chunks == 0):
        return _CHUNK(input, chunks, dim)
    part = size // chunks
    return tuple(input.narrow(dim, number * part, part) for number in range(chunks))


def _norm(norm: BatchNorm, x: Tensor) -> Tensor:
    batches, mean, variance = norm.num_batches_tracked, norm.running_mean, norm.running_var
    averages = norm.momentum is None and norm.training and norm.track_running_stats
    if not averages or batches is None or mean is None or variance is None:
        return _NORM(norm, x)
    check_input_of_norm(norm, x)
    batches.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    normed = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)  # writes those of this batch
    for running, new in zip((mean, variance), of_batch, strict=True):
        weight = batches.to(torch.promote_types(running.dtype, torch.float32)).reciprocal()
        running.copy_(running * (1 - weight) + new * weight)
    return normed


def _is_symmetric(_: Any, matrices: Tensor) -> Tensor:
    if not _are_square(matrices):
        return torch.zeros(matrices.shape[:-2], dtype=torch.bool, device=matrices.device)
    return torch.isclose(matrices, matrices.mT, atol=1e-6).all(-2).all(-1)


def _is_positive_semidefinite(_: Any, matrices: Tensor) -> Tensor:
    found = _is_symmetric(_, matrices)
    return found & torch.linalg.eigvalsh(matrices).ge(0).all(-1) if _are_square(matrices) else found


def _is_positive_definite(_: Any, matrices: Tensor) -> Tensor:
    found = _is_symmetric(_, matrices)
    return found & torch.linalg.cholesky_ex(matrices).info.eq(0) if _are_square(matrices) else found


def _are_square(matrices: Tensor) -> bool:
    return matrices.shape[-2] == matrices.shape[-1]


_LENGTHS = ((builtins, "len", _length), (torch, "chunk", _chunks), (Tensor, "chunk", _chunks))
_ALWAYS = (
    (BatchNorm, "forward", _norm),
    (type(constraints.symmetric), "check", _is_symmetric),
    (type(constraints.positive_semidefinite), "check", _is_positive_semidefinite),
    (type(constraints.positive_definite), "check", _is_positive_definite),
)


def open_lengths() -> AbstractContextManager[None]:
    """Let the built-in `len` return the size that a tensor has in its first dim, symbolic where that is; chunks too."""
    return _instead(_LENGTHS)


def without_numbers() -> AbstractContextManager[None]:
    """Let batch norms whose momentum is None, and constraints on matrices, read no numbers; all others are as ever."""
    return _instead(_ALWAYS)


@contextmanager
def _instead(functions: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, function in functions:
            stack.enter_context(mock.patch.object(holder, name, function))
        yield
