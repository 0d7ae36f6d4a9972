"""Sequences in rows: several in one row, with positions that restart and no loss where one would predict another.

A model whose attention masks follow from position ids keeps the sequences of a row apart, and its loss and gradients
are those of each sequence alone, weighted by their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetu_fx.errors import BatchError

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


def rows_by_room(lengths: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """Return which sequences share a row of at most `room` tokens: longest first, each where the least room is left.

    Args:
        lengths: tokens of the sequences.
        room: tokens of a row.

    Returns:
        For each row the positions in `lengths`, in order; rows in the order of their first sequence.
    """
    if lengths and max(lengths) > room:
        raise BatchError(
            f"a sequence of {max(lengths)} tokens does not fit a row of {room}\nhint: cut it, or widen the rows"
        )
    rows: list[list[int]] = []
    left: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [row for row in range(len(rows)) if left[row] >= lengths[position]]
        row = min(fitting, key=lambda row: (left[row], row), default=len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(position)
        left[row] -= lengths[position]
    return tuple(sorted(tuple(sorted(row)) for row in rows))


def pack_batch(
    sequences: Sequence[torch.Tensor], rows: Sequence[Sequence[int]], *, multiple: int = 1, padding: int = 0
) -> dict[str, Any]:
    """Return the batch of a causal language model whose rows hold these sequences one after another.

    Args:
        sequences: token ids, each of shape (tokens,).
        rows: for each row the positions of its sequences, each exactly once.
        multiple: rows are padded to a multiple of so many tokens.
        padding: the token that fills a row; nothing is learnt from it.

    Returns:
        `input_ids`, `position_ids` and `labels`, each int64 of shape (rows, tokens of the longest row), and
        `use_cache`, which is False. Positions count from 0 in every sequence. The first label of a sequence is
        ignored: nothing before it is its own.

    Raises:
        BatchError: a sequence stands in no row or in several, or is not of one dim.
    """
    _check(sequences, rows)
    width = max(sum(len(sequences[i]) for i in row) for row in rows)
    filling = Filling({"input_ids": padding, "labels": IGNORED}, "position_ids", ("labels",))
    width += -width % multiple
    tensors = fill_rows({"input_ids": sequences, "labels": sequences}, rows, width, filling)
    return {**tensors, "use_cache": False}


@dataclass(frozen=True)
class Filling:
    """What stands in rows besides the sequences' own values.

    Attributes:
        padding: what stands where no token is, by input; 0 where nothing is said.
        positions: the input of positions, which count from 0 in every sequence and in what fills the row; None: none.
        first_unused: inputs whose first value in a sequence is for nothing, and is replaced by the padding: labels
            that the model compares with the token before.
    """

    padding: Mapping[str, int] = field(default_factory=dict)
    positions: str | None = None
    first_unused: tuple[str, ...] = ()


def fill_rows(
    inputs: Mapping[str, Sequence[torch.Tensor]], rows: Sequence[Sequence[int]], width: int, filling: Filling
) -> dict[str, torch.Tensor]:
    """Return every input as rows that hold these sequences one after another.

    Args:
        inputs: by input, its part of each sequence, of shape (tokens, ...).
        rows: for each row the positions of its sequences.
        width: tokens of a row, as many at least as those of its sequences.
        filling: what else stands in them.

    Returns:
        Tensors of shape (rows, width, ...).
    """
    made = {name: _filled(name, parts, rows, width, filling) for name, parts in inputs.items()}
    if filling.positions is not None:
        parts = next(iter(inputs.values()))
        counted = [_positions([len(parts[i]) for i in row], width) for row in rows]
        made[filling.positions] = torch.stack(counted).to(parts[0].device)
    return made


def _filled(
    name: str, parts: Sequence[torch.Tensor], rows: Sequence[Sequence[int]], width: int, filling: Filling
) -> torch.Tensor:
    padding = filling.padding.get(name, 0)
    made = parts[0].new_full((len(rows), width, *parts[0].shape[1:]), padding)
    for number, row in enumerate(rows):
        start = 0
        for position in row:
            stop = start + len(parts[position])
            made[number, start:stop] = parts[position]
            if name in filling.first_unused:
                made[number, start] = padding
            start = stop
    return made


def _positions(lengths: Sequence[int], width: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in (*lengths, width - sum(lengths))])


def _check(sequences: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> None:
    placed = sorted(position for row in rows for position in row)
    if placed != list(range(len(sequences))) or not rows or not all(rows):
        raise BatchError(
            f"the rows hold sequences {placed} of the {len(sequences)} given\n"
            f"hint: put each in one row, and one or more in each row"
        )
    odd = [i for i, sequence in enumerate(sequences) if sequence.dim() != 1 or not len(sequence)]
    if odd:
        raise BatchError(
            f"sequences {odd} are not token ids of shape (tokens,) with a token or more\nhint: pass each as one"
        )
