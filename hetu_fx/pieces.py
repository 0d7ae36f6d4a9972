"""What ranks have of tensors, put together without a message: for ranks that are in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.local import index
from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.errors import DivergedError
from hetu_fx.switching.home.layout import HomeLayout


@dataclass(frozen=True)
class RankShard:
    """What a rank has of a tensor; without a layout it has all of it."""

    local: Tensor
    layout: HomeLayout | None

    @classmethod
    def of(cls, tensor: Any) -> RankShard:
        """Copy what this rank has of a tensor, a home tensor or a plain one, to the host."""
        if hasattr(tensor, "to_local"):
            return cls(tensor.to_local().detach().to(HOST, copy=True), tensor.home_layout)
        return cls(dense(tensor).detach().to(HOST, copy=True), None)


ROUNDING = 64
"""By how many units in the last place of its largest element a buffer of one replica may differ from another's."""
Pieces = Mapping[str, RankShard]
"""What a rank has of tensors, by name."""


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its elements, as what is compared has them."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def join_pieces(ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    """Return whole tensors by name. What no rank has of one is what `torch.empty` gives.

    Raises:
        DivergedError: ranks have unlike copies of the same elements.
    """
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {
        name: _whole(name, {rank: pieces[name] for rank, pieces in enumerate(ranks) if name in pieces})
        for name in names
    }


def _whole(name: str, pieces: Mapping[int, RankShard]) -> Tensor:
    """Put a tensor together from the elements that each rank counts; other ranks' copies must be the same bits.

    Tensors without a layout (buffers) nobody sends: replicas that share work otherwise make them by other sums.
    """
    first = next(iter(pieces.values()))
    whole = first.local if first.layout is None else first.local.new_empty(first.layout.shape)
    for piece in pieces.values():
        for box, part in () if piece.layout is None else piece.layout.counted_chunks:
            whole[index(box)] = piece.local[index(part)]
    has_numbers = not bool(whole.isnan().any())
    for rank, piece in pieces.items():
        expected = whole if piece.layout is None else piece.layout.take(whole)
        is_same = torch.equal if piece.layout is not None else _same_but_for_rounding
        if has_numbers and not is_same(piece.local, expected):
            raise DivergedError(f"rank {rank} has another copy of {name!r} than the rank that counts it")
    return whole


def _same_but_for_rounding(x: Tensor, other: Tensor) -> bool:
    if torch.equal(x, other) or not carries_gradient(x.dtype):
        return torch.equal(x, other)
    most = float(other.abs().max()) * ROUNDING * torch.finfo(x.dtype).eps
    return x.shape == other.shape and float((x - other).abs().max()) <= most
