"""What fixes a size that a trace could leave open: `len(x)` of a tensor, of which Python makes an int, and chunks of a
size that is a multiple of their number, which torch counts.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hetu_fx.base.torch_private import statically_known_true

_LEN, _CHUNK = builtins.len, torch.chunk


def _length(value: Any, /) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else _LEN(value)


def _chunks(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    size = input.shape[dim]
    if isinstance(size, int) or not statically_known_true(size % chunks == 0):
        return _CHUNK(input, chunks, dim)
    part = size // chunks
    return tuple(input.narrow(dim, number * part, part) for number in range(chunks))


@contextmanager
def open_lengths() -> Iterator[None]:
    """Let the built-in `len` return the size that a tensor has in its first dim, symbolic where that is; chunks too."""
    patches = ((builtins, "len", _length), (torch, "chunk", _chunks), (Tensor, "chunk", _chunks))
    with ExitStack() as stack:
        for holder, name, function in patches:
            stack.enter_context(mock.patch.object(holder, name, function))
        yield
