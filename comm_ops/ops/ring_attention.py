"""hetu::ring_attention: attention to keys and values of which each rank has a part, passed round while it computes.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context (section 3): no rank ever holds all
keys and values, and their transfers run beside the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.comm_ops.ops.op import FusedOp
from hetu_fx.comm_ops.ops.ring_attention_block import work_dtype
from hetu_fx.comm_ops.ops.ring_attention_run import Attention, GroupLinks
from hetu_fx.comm_ops.plans.choose_algorithm import always_flat
from hetu_fx.comm_ops.plans.cost import ring_cost, there_and_back_cost
from hetu_fx.comm_ops.plans.ring_plan import Ring
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.errors import CommError

_LAYOUT = "int[] ranks, SymInt[] queries, SymInt[] keys, bool is_causal, float? scale"


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ranks: list[int],
    queries: list[int],
    keys: list[int],
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    table, ring = active(), Ring(tuple(queries), tuple(keys), is_causal)
    _check(ring, table.position(ranks), query, key, value)
    mine = Attention(ring, table.position(ranks), query, key, value, mask, scale)
    out, lse = mine.forward(GroupLinks(ranks, table))
    return out.to(query.dtype).contiguous(), lse.contiguous()


def _check(ring: Ring, position: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    wanted = [ring.queries[position], ring.keys[position], ring.keys[position]]
    if [x.shape[-2] for x in (query, key, value)] != wanted:
        raise CommError(
            f"ring_attention expects {wanted} queries, keys and values at position {position} of queries "
            f"{list(ring.queries)} and keys {list(ring.keys)}, got tensors of shapes {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=work_dtype(query.dtype))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), lse


def _backward(
    inputs: tuple[Any, ...], results: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    query, key, value, mask, *layout = inputs
    found = torch.ops.hetu.ring_attention_backward(gradients[0], query, key, value, mask, *results, *layout)
    return (*found, None)


def _eager_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ranks: list[int],
    queries: list[int],
    keys: list[int],
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    table = active()
    mine = Attention(
        Ring(tuple(queries), tuple(keys), is_causal), table.position(ranks), query, key, value, mask, scale
    )
    found = mine.backward(gradient, out, lse, GroupLinks(ranks, table))
    of_queries, of_keys, of_values = (fresh(x.to(query.dtype)) for x in found)
    return of_queries, of_keys, of_values


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _no_second_derivative(inputs: Any, results: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    raise CommError("no second derivative through ring_attention; use a plan whose attention is 'gathered'")


RING_ATTENTION = FusedOp(
    name="ring_attention",
    summary="Attends to the keys and values of all `ranks`, which travel; gives the log-sum-exp too, without gradient.",
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, {_LAYOUT}) -> (Tensor, Tensor)",
    eager=_eager,
    fake=_fake,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=4,
    backward=_backward,
    backward_op="ring_attention_backward",
).register()

RING_ATTENTION_BACKWARD = FusedOp(
    name="ring_attention_backward",
    summary="Gives the gradients of queries, keys and values; keys and values travel again, with their gradients.",
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor lse, "
    f"{_LAYOUT}) -> (Tensor, Tensor, Tensor)",
    eager=_eager_backward,
    fake=_fake_backward,
    cost=there_and_back_cost,
    algorithm=always_flat,
    tensors=7,
    backward=_no_second_derivative,
    backward_op=None,
).register()
