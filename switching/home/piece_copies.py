"""Copies of home tensors remember what they are copies of, so that they have a name on every rank.

An average of parameters, or the best state so far, begins as a copy of something with a name. What it was a copy of,
as it was after how many writes, tells it from others on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import ref

import torch

from hetu_fx.base.torch_private import version
from hetu_fx.switching.home.layout import HomeLayout


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A piece that is a copy of another.

    Attributes:
        piece: the copy.
        source: the piece that it was copied from.
        writes: to the home tensor of that piece, when it was copied.
        layout: of both.
    """

    piece: ref[torch.Tensor]
    source: ref[torch.Tensor]
    writes: int
    layout: HomeLayout


_copies: dict[int, PieceCopy] = {}
_swaps = 0


def note_copy(source: torch.Tensor, source_piece: torch.Tensor, piece: torch.Tensor, layout: HomeLayout) -> None:
    """Remember as long as it is there that `piece` is a copy of that of the home tensor `source`."""
    number = id(piece)
    if piece is source_piece:
        return
    gone = ref(piece, lambda _: _copies.pop(number, None))
    _copies[number] = _without_the_middle(PieceCopy(gone, ref(source_piece), version(source), layout), source_piece)


def _without_the_middle(copied: PieceCopy, source_piece: torch.Tensor) -> PieceCopy:
    """Take a copy of an unwritten copy for one of what that is a copy of, which stays when the one between goes."""
    between = copy_at(source_piece)
    first = None if between is None else between.source()
    if between is None or first is None or version(source_piece) or first.dtype != source_piece.dtype:
        return copied
    return replace(copied, source=between.source, writes=between.writes)


def note_swap() -> None:
    """Remember that a tensor has another piece, which may be a copy, from now on."""
    global _swaps
    _swaps += 1


def swaps() -> int:
    """Return how often tensors have been given other pieces."""
    return _swaps


def copy_at(piece: torch.Tensor) -> PieceCopy | None:
    """Return what is known of a piece as a copy; None if it is none."""
    found = _copies.get(id(piece))
    return found if found is not None and found.piece() is piece else None


def all_copies() -> Iterator[tuple[torch.Tensor, PieceCopy]]:
    """Yield the copies that are there; from any thread."""
    for found in list(_copies.values()):
        piece = found.piece()
        if piece is not None:
            yield piece, found
