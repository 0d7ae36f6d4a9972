"""Attention that keeps to the sequences of packed rows: `hetu::sequence_places` finds them, `hetu::sequence_attention`
attends in each by itself.

What the second comes to depends on the device, as `KERNELS` says: slices for each sequence, torch's kernel for lengths
that vary, or, where neither is there, the whole row under a mask, as without this op.

Attention of packed rows by torch's kernel for sequences of varying lengths (FlashAttention; Dao 2023). Rows are laid
one after another, as tokens (tokens, heads, d), and sequences are said by where they begin in that. It is what
`torch.nn.attention.varlen` calls; here the log-sum-exp stays with the result, and the gradient is another op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula

from hetu_fx.comm_ops.ops.attention_runs import attend, gradients, neighbour_runs, result_like, token_places
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, Places, work_dtype
from hetu_fx.graph.meta import HALVES

aten = torch.ops.aten

_LEAST_CAPABILITY = (8, 0)
_MOST_CHANNELS = 256


def takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Tell whether the kernel is for this: whole rows in half precision without a mask, on a device that has it."""
    channels = query.shape[-1]
    is_one_size = channels == value.shape[-1] <= _MOST_CHANNELS and channels % 8 == 0
    fits = mask is None and query.dtype in HALVES and query.shape[-2] == key.shape[-2] and is_one_size
    return fits and torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def _attend_by_flash(query: Tensor, part: KeyValueBlock) -> tuple[Tensor, Tensor]:
    """Return the result (rows, heads, Q, d) and the log-sum-exp (rows, heads, Q)."""
    rows, heads, length, _ = query.shape
    given = *(_tokens(x) for x in (query, part.key, part.value)), *_sequences(query, part)
    found = aten._flash_attention_forward(*given, 0.0, _is_causal(part), False, scale=part.scale)
    return _rows(found[0], rows), found[1].reshape(heads, rows, length).transpose(0, 1).contiguous()


def _flash_gradients(
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


Gradients = tuple[Tensor, Tensor, Tensor]
Shape = tuple[int, ...]

_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor query_places, Tensor key_places"
_TENSORS = 6
_HOST = "cpu"


@torch.library.custom_op("hetu::sequence_places", mutates_args=(), schema="(Tensor groups) -> Tensor")
def sequence_places(groups: Tensor) -> Tensor:
    """Return where each token stands: the start of its sequence, and its place in the row (rows, tokens, 2)."""
    return token_places(groups)


@sequence_places.register_fake
def _(groups: Tensor) -> Tensor:
    return groups.new_empty((*groups.shape, 2), dtype=torch.int64, device=_HOST)


@dataclass(frozen=True, slots=True)
class SequenceKernel:
    """How attention keeps to sequences on a kind of device.

    Attributes:
        device: the type of torch's device.
        takes: whether it can, for a query, a key, a value, and a mask or None.
        forward: gives the result and the log-sum-exp of a query's scores.
        backward: gives gradients of query, key and value, from that of the result, the query, the part, result and
            log-sum-exp.
    """

    device: str
    takes: Callable[[Tensor, Tensor, Tensor, Tensor | None], bool]
    forward: Callable[[Tensor, KeyValueBlock], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, KeyValueBlock, Tensor, Tensor], Gradients]


KERNELS = (
    SequenceKernel("cpu", lambda *_: True, attend, gradients),
    SequenceKernel("cuda", takes_flash, _attend_by_flash, _flash_gradients),
)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> SequenceKernel | None:
    own = (kernel for kernel in KERNELS if kernel.device == query.device.type)
    return next((kernel for kernel in own if kernel.takes(query, key, value, mask)), None)


def _part(key: Tensor, value: Tensor, mask: Tensor | None, *others: Any) -> KeyValueBlock:
    query_places, key_places, is_causal, scale = others
    return KeyValueBlock(key, value, mask, 0 if is_causal else None, scale, Places(query_places, key_places))


@torch.library.custom_op(
    "hetu::sequence_attention_forward",
    mutates_args=(),
    schema=f"({_GIVEN}, bool is_causal, float? scale) -> (Tensor, Tensor)",
)
def sequence_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp."""
    kernel = _kernel(query, key, value, attn_mask)
    assert kernel is not None, "asked before"
    out, lse = kernel.forward(query, _part(key, value, attn_mask, *others))
    return out.to(query.dtype), lse


@sequence_attention_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=work_dtype(query.dtype))
    return result_like(query, value, query.dtype), lse


@torch.library.custom_op(
    "hetu::sequence_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_GIVEN}, Tensor out, Tensor lse, bool is_causal, float? scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def _sequence_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Any
) -> Gradients:
    """Return the gradients of query, key and value."""
    query_places, key_places, out, lse, is_causal, scale = others
    kernel = _kernel(query, key, value, attn_mask)
    assert kernel is not None, "asked before"
    part = _part(key, value, attn_mask, query_places, key_places, is_causal, scale)
    dq, dk, dv = kernel.backward(gradient, query, part, out, lse)
    return dq.to(query.dtype).contiguous(), dk.to(query.dtype).contiguous(), dv.to(query.dtype).contiguous()


@_sequence_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Gradients:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.how = inputs[_TENSORS:]


def _back(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.hetu.sequence_attention_backward(gradient, *ctx.saved_tensors, *ctx.how)
    return *found, *[None] * 5


sequence_attention_forward.register_autograd(_back, setup_context=_keep)


@register_flop_formula(torch.ops.hetu.sequence_attention_forward)
def _flops(query: Shape, key: Shape, value: Shape, *others: Any, **_: Any) -> int:
    """Return the FLOPs for rows of one sequence each; a causal one has half of all pairs of queries and keys."""
    (rows, heads, tokens, channels), is_causal = query, others[3]
    pairs = tokens * key[2] // (2 if is_causal else 1)
    return 2 * rows * heads * pairs * (channels + value[3])


def _sequence_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Any) -> Tensor:
    """Attend: queries to the keys of their sequence, with `is_causal` to those no later than they are.

    A mask that is given blocks what lies across sequences itself.
    """
    query_places, key_places, is_causal, scale, enable_gqa = others
    query, key, value = map(_in_autocast, (query, key, value))
    attn_mask = None if attn_mask is None else _in_autocast(attn_mask)
    if query.is_meta or _kernel(query, key, value, attn_mask) is not None:
        given = query, key, value, attn_mask, query_places, key_places, is_causal, scale
        out: Tensor = torch.ops.hetu.sequence_attention_forward(*given)[0]
        return out
    mask = _mask(query, query_places, key_places, is_causal) if attn_mask is None else attn_mask
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _in_autocast(x: Tensor) -> Tensor:
    """Return what autocast makes of an operand of attention."""
    kind = x.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if is_cast and x.dtype in (torch.float32, *HALVES) else x


def _mask(query: Tensor, query_places: Tensor, key_places: Tensor, is_causal: bool) -> Tensor:
    """Return which query sees which key (rows, 1, Q, K)."""
    rows, columns = query_places.to(query.device).unsqueeze(2), key_places.to(query.device).unsqueeze(1)
    sees = rows[..., 0] == columns[..., 0]
    sees = sees & (columns[..., 1] <= rows[..., 1]) if is_causal else sees
    return sees.unsqueeze(1)


_OPS = torch.library.Library("hetu", "FRAGMENT")
_OPS.define(f"sequence_attention({_GIVEN}, bool is_causal, float? scale, bool enable_gqa) -> Tensor")
_OPS.impl("sequence_attention", _sequence_attention, "CompositeImplicitAutograd")
