"""What `torch.distributions` checks of matrices, one thing after another, without going on by what came out before.

Torch asks whether a covariance is symmetric, and only then whether it is positive definite: a trace would have to go on
either way. All is asked here, and the answer is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributions import constraints


@contextmanager
def checked_at_once() -> Iterator[None]:
    """Let constraints on matrices ask all that they ask inside, whatever comes out."""
    checks = {
        constraints.symmetric: _is_symmetric,
        constraints.positive_semidefinite: _is_positive_semidefinite,
        constraints.positive_definite: _is_positive_definite,
    }
    with ExitStack() as stack:
        for constraint, check in checks.items():
            stack.enter_context(mock.patch.object(type(constraint), "check", check))
        yield


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
