"""Batches of sequences of mixed lengths: so many tokens each, nothing dropped, nothing twice.

As Hydraulis draws its batches (its "global token number"), sequences are taken in a shuffled order until the budget is
reached, and the last one is cut so that it is met exactly. Left is Hydraulis where it drops what is cut off: the rest
of a sequence begins the next batch, and one longer than `longest` comes in several pieces. A model gets them as nested
tensors (torch.jagged), which it takes at their own lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from hetu_fx.errors import BatchError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` (exclusive) of the sequence at `index` of a data set."""

    index: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or self.index < 0:
            raise BatchError(f"{self} is no piece of a sequence\nhint: give 0 <= start < stop and an index from 0")

    def __len__(self) -> int:
        return self.stop - self.start


class TokenBudgetSampler:
    """Yields batches of pieces with exactly `tokens` tokens; the last batch of an epoch has what is left.

    A `batch_sampler` for `torch.utils.data.DataLoader` over a `Pieces`. It is the same on every process that was
    given the same arguments, and its state says where it stands, so that a run that goes on sees what it has not seen.

    Args:
        lengths: tokens of each sequence; empty ones are left out.
        tokens: of a batch.
        longest: the longest piece; None: as long as the sequence is.
        shuffle: draw a new order in each epoch; otherwise sequences come as they stand.
        seed: of the order.
    """

    def __init__(
        self, lengths: Sequence[int], tokens: int, *, longest: int | None = None, shuffle: bool = True, seed: int = 0
    ) -> None:
        if tokens < 1 or (longest is not None and longest < 1):
            raise BatchError(f"a batch of {tokens} tokens in pieces of {longest} cannot be made\nhint: give 1 or more")
        if any(length < 0 for length in lengths):
            raise BatchError(f"a sequence cannot have {min(lengths)} tokens\nhint: give lengths of 0 or more")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._tokens, self._longest = tokens, longest
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._batches_done = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-int(self._lengths.sum()) // self._tokens)

    def __iter__(self) -> Iterator[list[Piece]]:
        """Yield the batches that are left of this epoch; the next call begins the next one."""
        batches = _batches_of(self._pieces(), self._tokens)
        for number, batch in enumerate(batches):
            if number >= self._batches_done:
                self._batches_done = number + 1
                yield batch
        self._epoch, self._batches_done = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its order depends on the seed and on its number."""
        self._epoch, self._batches_done = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where the sampler stands: batches that were yielded count as seen."""
        return {"epoch": self._epoch, "batches_done": self._batches_done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from where another sampler with the same arguments stood."""
        self._epoch, self._batches_done = state["epoch"], state["batches_done"]

    def _pieces(self) -> Iterator[Piece]:
        count = len(self._lengths)
        order = np.random.default_rng((self._seed, self._epoch)).permutation(count) if self._shuffle else range(count)
        for index in map(int, order):
            length = int(self._lengths[index])
            step = self._longest or max(length, 1)
            yield from (Piece(index, start, min(start + step, length)) for start in range(0, length, step))


def _batches_of(pieces: Iterator[Piece], tokens: int) -> Iterator[list[Piece]]:
    """Yield the pieces in groups of exactly `tokens` tokens, cut where a group is full; the last has what is left."""
    batch: list[Piece] = []
    room = tokens
    for whole in pieces:
        piece: Piece | None = whole
        while piece is not None:
            first, piece = _cut_piece(piece, room)
            batch.append(first)
            room -= len(first)
            if room == 0:
                yield batch
                batch, room = [], tokens
    if batch:
        yield batch


def _cut_piece(piece: Piece, room: int) -> tuple[Piece, Piece | None]:
    """Return the first `room` tokens of a piece, and the rest if there is any."""
    if len(piece) <= room:
        return piece, None
    at = piece.start + room
    return Piece(piece.index, piece.start, at), Piece(piece.index, at, piece.stop)


class Pieces:
    """A data set of sequences (anything that can be sliced) that is read by pieces.

    Raises:
        BatchError: for a piece that is longer than its sequence, as when lengths are of another data set.
    """

    def __init__(self, sequences: Sequence[Any]) -> None:
        self._sequences = sequences

    def __getitem__(self, piece: Piece) -> Any:
        found = self._sequences[piece.index][piece.start : piece.stop]
        if len(found) != len(piece):
            length = len(self._sequences[piece.index])
            raise BatchError(
                f"{piece} is not in sequence {piece.index}, which has {length} tokens\nhint: give its lengths"
            )
        return found


def nested_batch(sequences: Sequence[Any], **others: Any) -> dict[str, Any]:
    """Return a batch of a causal language model; made to be the `collate_fn` of a DataLoader over `Pieces`.

    Args:
        sequences: token ids (tensors, lists or bytes), which are their own labels; or mappings of inputs by name,
            each with an entry per token.
        others: further arguments of the model, such as use_cache=False.

    Returns:
        Nested tensors by input (`input_ids` and `labels`), and the others.

    Raises:
        BatchError: there are no sequences, or they have unlike inputs.
    """
    rows = [row if isinstance(row, dict) else {"input_ids": row, "labels": row} for row in sequences]
    if len({tuple(sorted(row)) for row in rows}) != 1:
        raise BatchError(
            f"sequences have inputs {[sorted(row) for row in rows]}\nhint: give one or more, all of the same"
        )
    inputs = {name: [_tensor(row[name]) for row in rows] for name in rows[0]}
    nested = {name: torch.nested.nested_tensor(parts, layout=torch.jagged) for name, parts in inputs.items()}
    return {**nested, **others}


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(list(values) if isinstance(values, bytes) else values)
