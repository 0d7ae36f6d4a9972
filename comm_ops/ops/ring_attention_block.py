"""Attention of some queries to one part of the keys: results that merge to attention to all, and their gradients.

With the log-sum-exp of each part's scores beside its result, the results of parts add up (online softmax: Milakov and
Gimelshein; Dao et al., FlashAttention, section 3.1):

    lse = log sum_j exp(lse_j),  out = sum_j exp(lse_j - lse) out_j

Given the whole's result and log-sum-exp, each part's gradients follow by themselves, and add up too:

    p_j = exp(s_j - lse),      ds_j = p_j (dout v_j^T - sum(dout out)),
    dv_j = p_j^T dout,         dk_j = ds_j^T q,         dq = sum_j ds_j k_j

Parts travel round a `Ring`, from neighbour to neighbour (Liu et al., Ring Attention with Blockwise Transformers,
section 3): at step t, position p has the part of position p - t. With a causal mask a part is read by no query before
it, so that it stops where its last reader is, and positions that need nothing more wait for nobody. In the backward the
gradients of a part follow it one step behind, and go home from its last reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_SCORES = 1 << 24  # entries of scores that are written out at once


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results and gradients of parts are added up."""
    return torch.float32 if dtype in _HALVES else dtype


@dataclass(frozen=True, slots=True)
class Places:
    """Where queries and keys stand in rows of several sequences, int64 (rows, Q, 2) and (rows, K, 2), on the cpu.

    For each token it is said where its sequence begins in the row, and where the token is.
    """

    query: Tensor
    key: Tensor

    def of_keys(self, first: int, count: int) -> Places:
        """Return the places for some of the keys."""
        return Places(self.query, self.key.narrow(1, first, count))


@dataclass(frozen=True, slots=True)
class KeyValueBlock:
    """What some queries attend to.

    `key` is (..., heads, K, d) and `value` (..., heads, K, e), where each head serves as many of the query's as there
    are for it. `mask` broadcasts to (..., query heads, Q, K): True where to attend, or added to scores. Query i
    attends to the keys up to i + `offset` (None: to all). Scores are scaled by `scale` (None: by 1 / sqrt(d)). With
    `places` a query attends to keys of its own sequence only (`attention_runs`).
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    offset: int | None = None
    scale: float | None = None
    places: Places | None = None


def attend(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor]:
    """Return the result (..., Q, e) and the log-sum-exp (..., Q) for queries (..., heads, Q, d) and a part of the keys.

    Both are in the dtype of sums. A query that may attend to no key of the part has result 0 and log-sum-exp -inf.
    """
    if not _is_fused(query, part):
        pieces = [_attend(rows, piece) for rows, piece, _ in _pieces(query, part)]
        return torch.cat([out for out, _ in pieces], -2), torch.cat([lse for _, lse in pieces], -1)
    bias, is_causal = _fused_mask(query, part)
    given = map(_dense, (query, part.key, part.value))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *given, 0.0, is_causal, attn_mask=_for_all(bias, query, part), scale=part.scale
    )
    dtype = work_dtype(query.dtype)
    return out.to(dtype), _nothing_where_blocked(lse.to(dtype), bias)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return result and log-sum-exp for the keys of two parts."""
    lse = torch.logaddexp(first[1], second[1])
    top = _finite(lse)
    out = sum(out * (part - top).exp().unsqueeze(-1) for out, part in (first, second))
    assert isinstance(out, Tensor)
    return out, lse


def gradients(
    gradient: Tensor, query: Tensor, part: KeyValueBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a part of the keys adds to the query's gradient, and the gradients of its keys and values.

    `out` and `lse` are those of all keys. The gradients are in the dtype of sums.
    """
    dtype = work_dtype(query.dtype)
    if _is_fused(query, part):
        bias, is_causal = _fused_mask(query, part)
        given = map(_dense, (gradient, query, part.key, part.value, out.to(query.dtype)))  # the result as it was made
        bias = _for_all(bias, query, part)
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, _finite(lse), 0.0, is_causal, attn_mask=bias, scale=part.scale
        )
        return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)
    delta = (gradient.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    of_queries = []
    of_keys, of_values = (torch.zeros_like(x, dtype=dtype) for x in (part.key, part.value))
    for rows, piece, place in _pieces(query, part):
        rest = (x.narrow(-2, *place) for x in (gradient.to(dtype), _finite(lse).unsqueeze(-1), delta))
        dq, dk, dv = _gradients(rows, piece, *rest)
        of_queries.append(dq)
        of_keys += dk
        of_values += dv
    return torch.cat(of_queries, -2), of_keys, of_values


def _finite(lse: Tensor) -> Tensor:
    """Let queries that attend to nothing weigh nothing, instead of being undefined."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _is_fused(query: Tensor, part: KeyValueBlock) -> bool:
    """Tell whether torch has a kernel that gives the log-sum-exp: so far for one kind of device."""
    fits = query.dim() == 4 and query.numel() > 0 and query.shape[-1] == part.value.shape[-1]
    return fits and query.device.type == "cpu"


def _fused_mask(query: Tensor, part: KeyValueBlock) -> tuple[Tensor | None, bool]:
    """Return what the fused kernel adds to scores, and whether it is to be causal."""
    if part.offset == 0 and part.mask is None:
        return None, True
    return _bias(query, part, query.dtype), False


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose channels lie one after another, as torch's kernel reads them whatever their stride is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _for_all(bias: Tensor | None, query: Tensor, part: KeyValueBlock) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:-1], part.key.shape[-2])


def _bias(query: Tensor, part: KeyValueBlock, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores: the mask, and minus infinity where a query must not attend."""
    bias = part.mask
    if bias is not None and bias.dtype is torch.bool:
        bias = torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, -math.inf)
    if part.offset is None:
        return None if bias is None else bias.to(dtype)
    rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(1)
    later = torch.arange(part.key.shape[-2], device=query.device) > rows + part.offset
    zeros = torch.zeros_like(later, dtype=dtype) if bias is None else bias.to(dtype)
    return torch.where(later, -math.inf, zeros)


def _nothing_where_blocked(lse: Tensor, bias: Tensor | None) -> Tensor:
    return lse if bias is None else lse.masked_fill((bias == -math.inf).all(-1), -math.inf)


def _pieces(query: Tensor, part: KeyValueBlock) -> Iterator[tuple[Tensor, KeyValueBlock, tuple[int, int]]]:
    """Yield some queries after another, with what each of them attends to and their place, to bound what is held."""
    total = query.shape[-2]
    size = max(1, _SCORES * total // max(1, query[..., 0].numel() * part.key.shape[-2]))
    for start in range(0, total, size):
        place = start, min(size, total - start)
        is_for_all = part.mask is None or part.mask.dim() < 2 or part.mask.shape[-2] == 1
        mask = part.mask if is_for_all or part.mask is None else part.mask.narrow(-2, *place)
        offset = None if part.offset is None else part.offset + start
        yield query.narrow(-2, *place), replace(part, mask=mask, offset=offset), place


def _scores(query: Tensor, part: KeyValueBlock) -> Tensor:
    """Return the scores (..., query heads, Q, K), in the dtype of sums."""
    dtype = work_dtype(query.dtype)
    scores = _by_head(query.to(dtype), part) @ part.key.to(dtype).transpose(-2, -1) * _scale(query, part)
    scores = scores.reshape(*query.shape[:-1], part.key.shape[-2])
    bias = _bias(query, part, dtype)
    return scores if bias is None else scores + bias


def _attend(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor]:
    scores = _scores(query, part)
    lse = scores.logsumexp(-1)
    weights = (scores - _finite(lse).unsqueeze(-1)).exp()
    out = _by_head(weights, part) @ part.value.to(scores.dtype)
    return out.reshape(*query.shape[:-1], part.value.shape[-1]), lse


def _gradients(
    query: Tensor, part: KeyValueBlock, gradient: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = gradient.dtype
    weights = (_scores(query, part) - lse).exp()
    of_weights = _by_head(gradient, part) @ part.value.to(dtype).transpose(-2, -1)
    of_scores = weights * (of_weights.reshape(weights.shape) - delta) * _scale(query, part)
    of_queries = (_by_head(of_scores, part) @ part.key.to(dtype)).reshape(query.shape)
    of_keys = _by_head(of_scores, part).transpose(-2, -1) @ _by_head(query.to(dtype), part)
    return of_queries, of_keys, _by_head(weights, part).transpose(-2, -1) @ _by_head(gradient, part)


def _scale(query: Tensor, part: KeyValueBlock) -> float:
    return 1 / math.sqrt(query.shape[-1]) if part.scale is None else part.scale


def _by_head(x: Tensor, part: KeyValueBlock) -> Tensor:
    """Put the rows of all query heads that a key's head serves one after another."""
    heads = part.key.shape[-3]
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads * x.shape[-2], x.shape[-1])


@dataclass(frozen=True, slots=True)
class Ring:
    """The parts of the queries, and of the keys and values, that each position of the ring has.

    With `is_causal` query i attends to the keys up to i, both counted from the start of the whole.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_causal: bool = False

    @property
    def steps(self) -> range:
        """Number the steps."""
        return range(len(self.keys))

    def part_at(self, position: int, step: int) -> int:
        """Tell whose part comes to a position at a step."""
        return (position - step) % len(self.keys)

    def offset(self, position: int, part: int) -> int:
        """Tell how much later the queries of a position start than the keys of a part."""
        return sum(self.queries[:position]) - sum(self.keys[:part])

    def reads(self, position: int, part: int) -> bool:
        """Tell whether some query of a position attends to some key of a part, as far as causality tells."""
        some = self.queries[position] > 0 and self.keys[part] > 0
        return some and (not self.is_causal or self.offset(position, part) + self.queries[position] > 0)

    def last_step(self, part: int) -> int:
        """Tell at which step a part is read last; 0 if nobody but its owner reads it."""
        return _last_steps(self)[part]

    def is_there(self, position: int, step: int) -> bool:
        """Tell whether the part of a step comes to a position at all."""
        return step in self.steps and self.last_step(self.part_at(position, step)) >= step


@lru_cache(maxsize=4096)
def _last_steps(ring: Ring) -> tuple[int, ...]:
    ways = len(ring.keys)
    reading = ([step for step in ring.steps if ring.reads((part + step) % ways, part)] for part in range(ways))
    return tuple(max(steps, default=0) for steps in reading)
