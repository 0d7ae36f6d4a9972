"""hetu::ring_attention: attention to keys and values of which each rank has a part, passed round while it computes.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context (section 3): no rank ever holds all
keys and values, and their messages travel while the part at hand is attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.comm_ops.ops.attention_runs import attend, gradients
from hetu_fx.comm_ops.ops.op import FusedOp
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, Places, Ring, merge, work_dtype
from hetu_fx.comm_ops.plans.choose_algorithm import always_flat
from hetu_fx.comm_ops.plans.cost import ring_cost, there_and_back_cost
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.flat import dense
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.errors import CommError

Message = tuple[int, int, Tensor]
"""The other position, a tag, and what is sent or filled."""

Start = Callable[[Sequence[Message], Sequence[Message]], Callable[[], None]]
"""Starts messages between positions, those sent and those received; what comes back waits until all are there."""

_FORWARD, _BACK, _HOME = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Attention:
    """One position's part of a ring attention: of queries, keys and values, with the mask's rows for its queries.

    `query` is (..., query heads, Q, d), `key` (..., heads, K, d), `value` (..., heads, K, e), Q and K those of the
    position; `mask` broadcasts to (..., query heads, Q, all keys). `places` are those of its queries and of all keys,
    where rows are packed.
    """

    ring: Ring
    position: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float | None
    places: Places | None = None

    def forward(self, start: Start) -> tuple[Tensor, Tensor]:
        """Return the result (..., Q, e) and the log-sum-exp (..., Q), in the dtype of sums."""
        dtype, found = work_dtype(self.query.dtype), None
        held: Tensor | None = self._packed(self.key, self.value)
        for step in self.ring.steps:
            arriving, wait = self._pass_on(held, step, start)
            if self._reads(step) and held is not None:
                here = attend(self.query, self._part(held, step))
                found = here if found is None else merge(found, here)
            wait()
            held = arriving
        if found is not None:
            return found
        nothing = self.query.new_zeros(*self.query.shape[:-1], self.value.shape[-1], dtype=dtype)
        return nothing, self.query.new_full(self.query.shape[:-1], -torch.inf, dtype=dtype)

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor, start: Start) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the position's queries, keys and values, from that of its result."""
        dtype, own = work_dtype(self.query.dtype), self.position
        of_queries = torch.zeros_like(self.query, dtype=dtype)
        of_own = self._room(own, dtype)
        held: Tensor | None = self._packed(self.key, self.value)
        coming, come = None, _nothing
        for step in self.ring.steps:
            arriving, wait = self._pass_on(held, step, start)
            here = None
            if self._reads(step) and held is not None:
                added, *pair = gradients(gradient, self.query, self._part(held, step), out, lse)
                of_queries += added
                here = self._packed(*pair)
            come()
            total = _sum(here, coming) if step else here if here is not None else torch.zeros_like(of_own)
            if step == self.ring.last_step(own) == 0 and total is not None:
                of_own = total
            coming, come = self._give_back(total, of_own, step, start)
            wait()
            held = arriving
        come()
        return of_queries, *self._unpacked(of_own, own)

    def _reads(self, step: int) -> bool:
        return self.ring.reads(self.position, self.ring.part_at(self.position, step))

    def _pass_on(self, held: Tensor | None, step: int, start: Start) -> tuple[Tensor | None, Callable[[], None]]:
        """Start to send on the keys and values of a step, and to receive those of the next."""
        ring, ways, after = self.ring, len(self.ring.keys), step + 1
        sends: list[Message] = []
        receives: list[Message] = []
        if held is not None and ring.is_there((self.position + 1) % ways, after):
            sends.append(((self.position + 1) % ways, 3 * step + _FORWARD, held))
        arriving = None
        if ring.is_there(self.position, after):
            arriving = self._room(ring.part_at(self.position, after), self.key.dtype)
            receives.append(((self.position - 1) % ways, 3 * step + _FORWARD, arriving))
        return arriving, start(sends, receives)

    def _give_back(
        self, total: Tensor | None, of_own: Tensor, step: int, start: Start
    ) -> tuple[Tensor | None, Callable[[], None]]:
        """Start to send the gradients of a step's part to its next reader, or home, and to receive others."""
        ring, ways, part = self.ring, len(self.ring.keys), self.ring.part_at(self.position, step)
        sends: list[Message] = []
        receives: list[Message] = []
        if total is not None and ring.last_step(part) > step:
            sends.append(((self.position + 1) % ways, 3 * step + _BACK, total))
        elif total is not None and ring.last_step(part) == step > 0:
            sends.append((part, 3 * step + _HOME, total))
        coming = None
        if ring.is_there(self.position, step + 1):
            coming = self._room(ring.part_at(self.position, step + 1), of_own.dtype)
            receives.append(((self.position - 1) % ways, 3 * step + _BACK, coming))
        if ring.last_step(self.position) == step > 0:
            receives.append(((self.position + step) % ways, 3 * step + _HOME, of_own))
        return coming, start(sends, receives)

    def _part(self, held: Tensor, step: int) -> KeyValueBlock:
        """Return what the queries attend to at a step."""
        ring, number = self.ring, self.ring.part_at(self.position, step)
        key, value = self._unpacked(held, number)
        mask = self.mask
        if mask is not None and mask.shape[-1] > 1:
            mask = mask.narrow(-1, sum(ring.keys[:number]), ring.keys[number])
        offset = ring.offset(self.position, number) if ring.is_causal else None
        sees_all = offset is not None and offset >= ring.keys[number] - 1
        places = None if self.places is None else self.places.of_keys(sum(ring.keys[:number]), ring.keys[number])
        return KeyValueBlock(key, value, mask, None if sees_all else offset, self.scale, places)

    def _shapes(self, part: int) -> tuple[list[int], list[int]]:
        size = self.ring.keys[part]
        key, value = ([*x.shape[:-2], size, x.shape[-1]] for x in (self.key, self.value))
        return key, value

    def _packed(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def _unpacked(self, flat: Tensor, part: int) -> tuple[Tensor, Tensor]:
        shapes = self._shapes(part)
        key, value = flat.split([torch.Size(shape).numel() for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def _room(self, part: int, dtype: torch.dtype) -> Tensor:
        numels = (torch.Size(shape).numel() for shape in self._shapes(part))
        return self.key.new_empty(sum(numels), dtype=dtype)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first.add_(second)


def _nothing() -> None:
    """Wait for nothing."""


def _start_between(ranks: Sequence[int], table: GroupTable) -> Start:
    """Return what starts messages between `ranks`, whose positions they are in the ring; empty ones are left out."""

    def start(sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        leaving = [(ranks[peer], dense(x), Tag.RING + tag) for peer, tag, x in sends if x.numel()]
        arriving = [(ranks[peer], x, Tag.RING + tag) for peer, tag, x in receives if x.numel()]
        if not leaving and not arriving:
            return _nothing
        with guarded("ring attention", ranks, table):
            posted = post(arriving, leaving, table, table.group(ranks))

        def wait() -> None:
            with guarded("ring attention", ranks, table):
                posted.wait()

        return wait

    return start


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? query_places, Tensor? key_places"
_LAYOUT = "int[] ranks, SymInt[] queries, SymInt[] keys, bool is_causal, float? scale"


def _here(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Attention, Start]:
    """Return this rank's part, and what carries its messages."""
    mask, query_places, key_places, ranks, queries, keys, is_causal, scale = others
    table, ring = active(), Ring(tuple(queries), tuple(keys), is_causal)
    _check(ring, table.position(ranks), query, key, value)
    places = None if query_places is None else Places(query_places, key_places)
    mine = Attention(ring, table.position(ranks), query, key, value, mask, scale, places)
    return mine, _start_between(ranks, table)


def _eager(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    mine, start = _here(query, *others)
    out, lse = mine.forward(start)
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
    given, layout = inputs[: RING_ATTENTION.tensors], inputs[RING_ATTENTION.tensors :]
    found = torch.ops.hetu.ring_attention_backward(gradients[0], *given, *results, *layout)
    return (*found, None, None, None)


def _eager_backward(gradient: Tensor, query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    key, value, mask, query_places, key_places, out, lse, *layout = others
    mine, start = _here(query, key, value, mask, query_places, key_places, *layout)
    found = mine.backward(gradient, out, lse, start)
    of_queries, of_keys, of_values = (fresh(x.to(query.dtype)) for x in found)
    return of_queries, of_keys, of_values


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _no_second_derivative(inputs: Any, results: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    raise CommError("no second derivative through ring_attention\nhint: use a plan whose attention is 'gathered'")


RING_ATTENTION = FusedOp(
    name="ring_attention",
    summary="Attends to the keys and values of all `ranks`, which travel; gives the log-sum-exp too, without gradient.",
    schema=f"({_GIVEN}, {_LAYOUT}) -> (Tensor, Tensor)",
    eager=_eager,
    fake=_fake,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=6,
    backward=_backward,
    backward_op="ring_attention_backward",
).register()

RING_ATTENTION_BACKWARD = FusedOp(
    name="ring_attention_backward",
    summary="Gives the gradients of queries, keys and values; keys and values travel again, with their gradients.",
    schema=f"(Tensor gradient, {_GIVEN}, Tensor out, Tensor lse, {_LAYOUT}) -> (Tensor, Tensor, Tensor)",
    eager=_eager_backward,
    fake=_fake_backward,
    cost=there_and_back_cost,
    algorithm=always_flat,
    tensors=9,
    backward=_no_second_derivative,
    backward_op=None,
).register()
