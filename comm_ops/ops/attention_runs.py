"""Attention in packed rows: the tokens of each sequence of a row attend to each other, and to nobody else's.

A device that has a part of the tokens has their places. So attention of some queries to some keys is, for each sequence
of a row, that of a run of queries to a run of keys, and a row of sequences s costs the sum of s^2 instead of the square
of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from hetu_fx.comm_ops.ops import ring_attention_block as whole
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, Places, work_dtype


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Queries of one sequence, and the keys that they attend to: the first and how many of each.

    `offset` is as that of `KeyValueBlock`; with `continues` the queries have attended to other keys before.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    offset: int | None
    continues: bool = False

    def apart(self) -> tuple[AttentionRun, ...]:
        """Return runs that need no mask: what all of its queries see, and after that what begins with the first."""
        if self.offset is None or self.offset <= 0:
            return (self,)
        (first, count), seen = self.keys, self.offset
        before = AttentionRun(self.queries, (first, seen), None)
        return before, AttentionRun(self.queries, (first + seen, count - seen), 0, continues=True)


def token_places(groups: Tensor) -> Tensor:
    """Return the places of tokens (rows, tokens), those of one sequence being numbered alike.

    The numbers of a row do not fall. Where they do, sequences may come back, and the row counts as one sequence.
    """
    groups = groups.cpu()
    before, after = groups[:, :-1], groups[:, 1:]
    index = torch.arange(groups.shape[1]).expand(groups.shape)
    starts = index.clone()
    starts[:, 1:].masked_fill_(before == after, 0)
    starts = starts.cummax(1).values if groups.shape[1] else starts
    starts = starts.masked_fill((after < before).any(1, keepdim=True), 0)
    return torch.stack([starts, index], -1)


def neighbour_runs(places: Places, is_causal: bool) -> Iterator[tuple[slice, tuple[AttentionRun, ...]]]:
    """Yield the runs of rows, those of neighbours that have the same together.

    Causal ones have no key after a query.
    """
    layouts = (_row_runs(*row, is_causal) for row in zip(places.query, places.key, strict=True))
    first = 0
    for runs, alike in groupby(layouts):
        count = sum(1 for _ in alike)
        yield slice(first, first + count), runs
        first += count


def _row_runs(queries: Tensor, keys: Tensor, is_causal: bool) -> tuple[AttentionRun, ...]:
    """Return the runs of one row; queries without a key are in none."""
    of_keys = {start: (first, count, place) for start, first, count, place in _sequences(keys)}
    found: list[AttentionRun] = []
    for start, query, count, place in _sequences(queries):
        key, most, other = of_keys.get(start, (0, 0, 0))
        offset = place - other
        seen = min(most, offset + count) if is_causal else most
        if seen > 0:
            sees_all = not is_causal or offset >= seen - 1
            found += AttentionRun((query, count), (key, seen), None if sees_all else offset).apart()
    return tuple(found)


def _sequences(row: Tensor) -> list[tuple[int, int, int, int]]:
    """Return for each sequence of a row its start, its first token here, how many there are, and the first's place."""
    starts, counts = torch.unique_consecutive(row[:, 0], return_counts=True)
    first = counts.cumsum(0) - counts
    return list(zip(*(x.tolist() for x in (starts, first, counts, row[first, 1])), strict=True))


def attend(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp for queries (rows, heads, Q, d), each attending to its own sequence.

    With places, a part with any `offset` is causal: how far, the places say.
    """
    if part.places is None:
        return whole.attend(query, part)
    dtype = work_dtype(query.dtype)
    out = result_like(query, part.value, dtype).zero_()
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
    for rows, runs in neighbour_runs(part.places, part.offset is not None):
        for run in runs:
            queries = query[rows].narrow(-2, *run.queries)
            found, sums = whole.attend(queries, _part_of(part, rows, run))
            if run.continues:
                before = out[rows].narrow(-2, *run.queries), lse[rows].narrow(-1, *run.queries)
                found, sums = whole.merge(before, (found, sums))
            out[rows].narrow(-2, *run.queries).copy_(found)
            lse[rows].narrow(-1, *run.queries).copy_(sums)
    return out, lse


def gradients(
    gradient: Tensor, query: Tensor, part: KeyValueBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a part of the keys adds to the query's gradient, and the gradients of its keys and values."""
    if part.places is None:
        return whole.gradients(gradient, query, part, out, lse)
    dtype = work_dtype(query.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (query, part.key, part.value))
    for rows, runs in neighbour_runs(part.places, part.offset is not None):
        for run in runs:
            given = gradient[rows].narrow(-2, *run.queries), query[rows].narrow(-2, *run.queries)
            results = out[rows].narrow(-2, *run.queries), lse[rows].narrow(-1, *run.queries)
            found = whole.gradients(*given, _part_of(part, rows, run), *results)
            for total, at, some in zip((dq, dk, dv), (run.queries, run.keys, run.keys), found, strict=True):
                total[rows].narrow(-2, *at).add_(some)
    return dq, dk, dv


def result_like(query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty result (rows, heads, Q, e), laid out as torch's kernels do: the heads of a token together."""
    rows, heads, tokens, _ = query.shape
    return query.new_empty((rows, tokens, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)


def _part_of(part: KeyValueBlock, rows: slice, run: AttentionRun) -> KeyValueBlock:
    key, value = (x[rows].narrow(-2, *run.keys) for x in (part.key, part.value))
    return replace(part, key=key, value=value, mask=_mask_of(part.mask, rows, run), offset=run.offset, places=None)


def _mask_of(mask: Tensor | None, rows: slice, run: AttentionRun) -> Tensor | None:
    """Return the mask's entries for a run; of dims that are broadcast all there is."""
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask[rows]
    for dim, at in ((-2, run.queries), (-1, run.keys)):
        if mask.dim() >= -dim and mask.shape[dim] > 1:
            mask = mask.narrow(dim, *at)
    return mask
