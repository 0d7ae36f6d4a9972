"""A device's rows among those of all: `hetu::place_rows` puts them there, with zeros elsewhere, `hetu::own_rows` takes
them out again.

The sum of what all devices have placed is the whole batch, to the last bit. A dim with rows is (outer, rows, inner).
Where a device's rows begin is in `state`, int64[3] on the cpu (seed, step, index of the first row in the global batch).
Each op is the other's adjoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.graph import meta
from hetu_fx.graph.edit import cast, insert

FIRST_ROW = 2  # in `state`

RowLayout = tuple[int, int, int]
"""Where the rows of a value are: (dim, outer, inner), what comes before and after them in that dim."""


@torch.library.custom_op(
    "hetu::place_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor state, SymInt total, int dim, int outer, int inner) -> Tensor",
)
def place_rows(x: Tensor, state: Tensor, total: int, dim: int, outer: int, inner: int) -> Tensor:
    """Return `total` rows of zeros, with those that a dim of `x` has where they belong."""
    rows = x.shape[dim] // (outer * inner)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    placed = x.new_zeros((*before, outer, total, inner, *after))
    placed.narrow(dim + 1, int(state[FIRST_ROW]), rows).copy_(x.reshape(*before, outer, rows, inner, *after))
    return placed.reshape(*before, outer * total * inner, *after)


@place_rows.register_fake
def _(x: Tensor, state: Tensor, total: int, dim: int, outer: int, inner: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], outer * total * inner, *x.shape[dim + 1 :]))


@torch.library.custom_op(
    "hetu::own_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor state, SymInt rows, int dim, int outer, int inner) -> Tensor",
)
def own_rows(x: Tensor, state: Tensor, rows: int, dim: int, outer: int, inner: int) -> Tensor:
    """Return so many `rows` of those that a dim of `x` has of all devices."""
    total = x.shape[dim] // (outer * inner)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    seen = x.reshape(*before, outer, total, inner, *after)
    return seen.narrow(dim + 1, int(state[FIRST_ROW]), rows).reshape(*before, outer * rows * inner, *after).clone()


@own_rows.register_fake
def _(x: Tensor, state: Tensor, rows: int, dim: int, outer: int, inner: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], outer * rows * inner, *x.shape[dim + 1 :]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, state, _, ctx.dim, ctx.outer, ctx.inner = inputs
    ctx.rows = x.shape[ctx.dim] // (ctx.outer * ctx.inner)
    ctx.save_for_backward(state)


def _take_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (state,) = ctx.saved_tensors
    back = torch.ops.hetu.own_rows(gradient, state, ctx.rows, ctx.dim, ctx.outer, ctx.inner)
    return back, None, None, None, None, None


def _put_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (state,) = ctx.saved_tensors
    back = torch.ops.hetu.place_rows(gradient, state, ctx.rows, ctx.dim, ctx.outer, ctx.inner)
    return back, None, None, None, None, None


place_rows.register_autograd(_take_back, setup_context=_remember)
own_rows.register_autograd(_put_back, setup_context=_remember)

PLACE, OWN = torch.ops.hetu.place_rows.default, torch.ops.hetu.own_rows.default


def insert_row_mask(here: fx.Node, value: fx.Node, state: fx.Node, total: int | fx.Node, layout: RowLayout) -> fx.Node:
    """Insert, before `here`, that a device's rows of a value are placed: booleans as numbers, which can be summed."""
    kind = meta.dtype(value)
    summable = cast(here, value, torch.uint8) if kind is torch.bool else value
    return cast(here, insert(here, PLACE, summable, state, total, *layout), kind)
