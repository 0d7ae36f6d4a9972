"""Attention of packed rows by torch's kernel for sequences of varying lengths (FlashAttention; Dao 2023).

Rows are laid one after another, as tokens (tokens, heads, d), and sequences are said by where they begin in that. It is
what `torch.nn.attention.varlen` calls; here the log-sum-exp stays with the result, and the gradient is another op.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from hetu_fx.comm_ops.ops.attention_runs import neighbour_runs
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock
from hetu_fx.graph.meta import HALVES

aten = torch.ops.aten

_LEAST_CAPABILITY = (8, 0)
_MOST_CHANNELS = 256


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Tell whether the kernel is for this: whole rows in half precision without a mask, on a device that has it."""
    channels = query.shape[-1]
    is_one_size = channels == value.shape[-1] <= _MOST_CHANNELS and channels % 8 == 0
    fits = mask is None and query.dtype in HALVES and query.shape[-2] == key.shape[-2] and is_one_size
    return fits and torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def attend(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor]:
    """Return the result (rows, heads, Q, d) and the log-sum-exp (rows, heads, Q)."""
    rows, heads, length, _ = query.shape
    given = *(_tokens(x) for x in (query, part.key, part.value)), *_sequences(query, part)
    found = aten._flash_attention_forward(*given, 0.0, _is_causal(part), False, scale=part.scale)
    return _rows(found[0], rows), found[1].reshape(heads, rows, length).transpose(0, 1).contiguous()


def gradients(
    gradient: Tensor, query: Tensor, part: KeyValueBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    given = (_tokens(x) for x in (gradient, query, part.key, part.value, out))
    sums = lse.transpose(0, 1).reshape(lse.shape[1], -1).contiguous()
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    found = aten._flash_attention_backward(
        *given, sums, *_sequences(query, part), 0.0, _is_causal(part), seed, unused, scale=part.scale
    )
    dq, dk, dv = (_rows(x, query.shape[0]) for x in found)
    return dq, dk, dv


def _is_causal(part: KeyValueBlock) -> bool:
    return part.offset is not None


def _sequences(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor, int, int]:
    """Return where sequences begin among the tokens of queries and of keys, and the lengths of the longest."""
    assert part.places is not None, "only packed rows come here"
    lengths: list[int] = []
    for rows, runs in neighbour_runs(part.places, is_causal=False):
        lengths += [run.queries[1] for run in runs] * (rows.stop - rows.start)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
    return starts, starts, max(lengths), max(lengths)


def _tokens(x: Tensor) -> Tensor:
    """Return what is (rows, heads, tokens, d) as (rows x tokens, heads, d)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _rows(tokens: Tensor, rows: int) -> Tensor:
    return tokens.reshape(rows, -1, *tokens.shape[1:]).transpose(1, 2)
