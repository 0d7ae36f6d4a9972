"""Products of a tensor parallel group, beside the communication before or after them.

`gathered_products` are Megatron's column-parallel ones: of rows that all ranks have, or that are gathered first, so
that those that are here are multiplied while others travel. In the backward the gradient of the rows is summed, and
scattered where they were gathered, while the gradients of the weights are made. `summed_product` is the row-parallel
one: its summands are made in slices, of which one travels while the next is made, or where other ranks of the machine
read them. Its backward has nothing to sum; where the result was scattered, gradients are gathered in slices. (Wang et
al., Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models, ASPLOS 2023;
Megatron-LM's `tp_comm_overlap`.)

`sizes` are the parts in which dim `dim` of the rows is cut by rank; none where it is not. `slices` says in how many
slices so many rows are cut (`plans.overlap`): all ranks of a group know all rows, so that they cut alike. Rows are
multiplied in the dtype of the weights; their gradients are summed in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.ops.op import FusedOp, call
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS_BY_NAME
from hetu_fx.comm_ops.plans.algorithm import Algorithm, parse_algorithm
from hetu_fx.comm_ops.plans.choose_algorithm import always_flat
from hetu_fx.comm_ops.plans.cost import ring_cost
from hetu_fx.comm_ops.plans.overlap import Slices, parse_slices
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.errors import CommError

LINEAR = "aten.linear.default"

Products = Callable[[Tensor], list[Tensor]]
"""Multiplies rows with some weights."""
Bounds = Sequence[tuple[int, int]]
"""Of each rank's part of the rows, where a slice of it begins, and its size."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of a product, and how its rows are cut; see the module."""

    table: GroupTable
    ranks: Sequence[int]
    dim: int
    sizes: Sequence[int]
    algorithm: Algorithm
    slices: Slices

    @classmethod
    def of(cls, ranks: Sequence[int], dim: int, sizes: Sequence[int], form: str, slices: str = "") -> _Group:
        """Return it as ops are told it."""
        return cls(active(), ranks, dim, sizes, parse_algorithm(form), parse_slices(slices))

    @property
    def here(self) -> int:
        """This rank's place in it."""
        return self.table.position(self.ranks)

    @property
    def starts(self) -> list[int]:
        """Where every rank's part begins among all rows."""
        return list(accumulate(self.sizes, initial=0))[:-1]

    def collectives(self, *, is_async: bool = True) -> Collectives:
        """Return its collectives: without `is_async` it does nothing beside them."""
        return Collectives(self.ranks, self.algorithm, self.table, is_async=is_async)

    def count(self, rows: int) -> int:
        """Return in how many slices all rows are cut."""
        return self.slices.count(rows) if len(self.ranks) > 1 else 1

    def cut(self, like: Tensor) -> list[Bounds]:
        """Return the slices of rows that are like `like` but for their size in the dim that is cut."""
        shape = like.shape[:-1]
        around = prod(shape[: self.dim]) * prod(shape[self.dim + 1 :])
        count = self.count(around * sum(self.sizes))
        cuts = [even_sizes(size, count) for size in self.sizes]
        return [[(sum(sizes[:number]), sizes[number]) for sizes in cuts] for number in range(count)]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


# Products of rows that all ranks have, or that are gathered.


def _gathered_products(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], product: str, *layout: Any
) -> list[Tensor]:
    products, group, rows = _products(product, weights, biases), _Group.of(*layout), x.to(weights[0].dtype)
    if not group.sizes:
        return products(x) if rows is x else [*products(rows), rows]
    x = rows
    slices = group.cut(x)
    if len(slices) > 1:
        return _gathered_in_slices(x, products, group, slices)
    shapes = [_resized(x, group.dim, size) for size in group.sizes]
    whole = torch.cat(group.collectives(is_async=False).gather(x, shapes).wait(), group.dim)
    return [*products(whole), whole]


def _products(name: str, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Products:
    act = PRODUCTS_BY_NAME[name].call
    pairs = list(zip_longest(weights, biases))
    return lambda rows: [act(rows, weight, bias) for weight, bias in pairs]


def _gathered_in_slices(x: Tensor, products: Products, group: _Group, slices: Sequence[Bounds]) -> list[Tensor]:
    """Multiply the rank's own rows while the first slice travels, and each that has come while the next does."""
    here, starts = group.here, group.starts
    under_way = [_start_slice(x, bounds, group) for bounds in slices]
    whole = _Room(group).put([(starts[here], group.sizes[here])], [x])
    made = _Room(group).put([(starts[here], group.sizes[here])], products(x))
    others = [place for place in range(len(starts)) if place != here]
    for bounds, started in zip(slices, under_way, strict=True):
        parts = started.wait()
        rows = torch.cat([parts[place] for place in others], group.dim)
        places = [(starts[place] + bounds[place][0], bounds[place][1]) for place in others]
        whole.put(places, [rows])
        made.put(places, products(rows))
    return [*made.found, *whole.found]


def _start_slice(x: Tensor, bounds: Bounds, group: _Group) -> Exchange[list[Tensor]]:
    mine = x.narrow(group.dim, *bounds[group.here])
    shapes = [_resized(x, group.dim, size) for _, size in bounds]
    return group.collectives().gather(mine, shapes)


class _Room:
    """Tensors of all rows, which come in pieces."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        self.found: list[Tensor] = []

    def put(self, places: Bounds, pieces: Sequence[Tensor]) -> _Room:
        """Write rows that lie end to end in each of some tensors to their places in all rows."""
        dim, size = self._group.dim, sum(self._group.sizes)
        self.found = self.found or [piece.new_empty(_resized(piece, dim, size)) for piece in pieces]
        for room, piece in zip(self.found, pieces, strict=True):
            for (start, count), part in zip(places, piece.split([count for _, count in places], dim), strict=True):
                room.narrow(dim, start, count).copy_(part)
        return self


def _fake_gathered_products(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], product: str, *layout: Any
) -> list[Tensor]:
    products, (_, dim, sizes, *_), dtype = _products(product, weights, biases), layout, weights[0].dtype
    if not sizes and x.dtype == dtype:
        return products(x)
    whole = x.new_empty(_resized(x, dim, sum(sizes)) if sizes else x.shape, dtype=dtype)
    return [*products(whole), whole]


Wanted = tuple[bool, list[bool], list[bool]]
"""Whether gradients of the rows, of each weight and of each bias are wanted."""


def _gathered_products_backward(
    gradients: list[Tensor],
    rows: Tensor,
    weights: list[Tensor],
    product: str,
    dtype: torch.dtype,
    of_rows: bool,
    of_weights: list[bool],
    of_biases: list[bool],
    *layout: Any,
) -> list[Tensor]:
    """Return the gradients that are wanted; that of the rows travels while the others are made."""
    started = _start_back(gradients, weights, product, dtype, _Group.of(*layout)) if of_rows else None
    found = _of_ends(gradients, rows, weights, product, of_weights, of_biases)
    return found if started is None else [started.wait(), *found]


def _of_rows(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], product: str, into: Tensor | None = None
) -> Tensor:
    """Return the gradient of rows that several weights are multiplied with: this rank's summand, made in `into`."""
    made = PRODUCTS_BY_NAME[product]
    assert made.of_input is not None, product
    assert made.add_of_input is not None, product
    first, *others = zip(gradients, weights, strict=True)
    total = made.of_input(*first) if into is None else made.add_of_input(into, *first, 0)
    for pair in others:
        total = total + made.of_input(*pair) if total.requires_grad else made.add_of_input(total, *pair, 1)
    return total


def _of_ends(
    gradients: Sequence[Tensor],
    rows: Tensor,
    weights: Sequence[Tensor],
    product: str,
    of_weights: Sequence[bool],
    of_biases: Sequence[bool],
) -> list[Tensor]:
    """Return those gradients of weights, and then those of biases, that are wanted."""
    of_weight, x = PRODUCTS_BY_NAME[product].of_weight, rows.flatten(0, -2)
    flat = [gradient.flatten(0, -2) for gradient in gradients]
    found = [of_weight(x, g, w) for g, w, wanted in zip(flat, weights, of_weights, strict=True) if wanted]
    return found + [g.sum(0) for g, wanted in zip(flat, of_biases, strict=False) if wanted]


def _start_back(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], product: str, dtype: torch.dtype, group: _Group
) -> Exchange[Tensor]:
    """Begin to sum the gradient of rows, which is made where the others read it, if they can."""
    place = None
    if not group.sizes and dtype == gradients[0].dtype:
        width = weights[0].shape[1 - PRODUCTS_BY_NAME[product].out]
        place = group.collectives().place_of_sum(gradients[0], [*gradients[0].shape[:-1], width])
    made = _of_rows(gradients, weights, product, None if place is None else place.value)
    if group.sizes:
        return group.collectives().scatter(made.to(dtype).split(list(group.sizes), group.dim))
    return group.collectives().sum(made.to(dtype) if place is None else place)


def _fake_gathered_products_backward(
    gradients: list[Tensor],
    rows: Tensor,
    weights: list[Tensor],
    product: str,
    dtype: torch.dtype,
    of_rows: bool,
    of_weights: list[bool],
    of_biases: list[bool],
    *layout: Any,
) -> list[Tensor]:
    ranks, dim, sizes, *_ = layout
    found = [w.new_empty(w.shape) for w, wanted in zip(weights, of_weights, strict=True) if wanted]
    found += [g.new_empty(g.shape[-1:]) for g, wanted in zip(gradients, of_biases, strict=False) if wanted]
    if not of_rows:
        return found
    shape = _resized(rows, dim, sizes[active().position(ranks)]) if sizes else list(rows.shape)
    return [rows.new_empty(shape, dtype=dtype), *found]


@dataclass(frozen=True, slots=True)
class GatheredProducts(FusedOp):
    """The record of `gathered_products`; all rows are kept for the backward, and the weights."""

    def sends(self, args: Sequence[Any]) -> bool:
        """Tell whether rows are gathered; those that all have are not."""
        _, _, sizes, *_ = args[self.tensors + 1 :]
        return bool(sizes)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weights, _, *ctx.layout = inputs
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)  # nobody asks for that of the rows that it keeps
        ctx.shapes = [made.shape for made in output[: len(weights)]]
        ctx.save_for_backward(x if len(output) == len(weights) else output[-1], *weights)

    def _backward(self, ctx: Any, *results: Any) -> tuple[Any, ...]:
        (gradients,), (rows, *weights) = results, ctx.saved_tensors
        product, ranks, dim, sizes, form, *_ = ctx.layout
        of_rows, of_weights, of_biases, *_ = ctx.needs_input_grad
        wanted = of_rows, list(of_weights), list(of_biases)
        pairs = zip(gradients, ctx.shapes, strict=False)
        given = [rows.new_zeros(shape) if gradient is None else gradient for gradient, shape in pairs]
        if torch.is_grad_enabled():
            found = _differentiable(given, gradients[len(given) :], rows, weights, ctx.dtype, ctx.layout, wanted)
        else:
            back = torch.ops.hetu.gathered_products_backward
            found = back(given, rows, weights, product, ctx.dtype, *wanted, ranks, dim, sizes, form)
        return (*_in_place(found, wanted), *([] if argument == [] else None for argument in ctx.layout))


def _differentiable(
    gradients: Sequence[Tensor],
    of_whole: Sequence[Tensor | None],
    rows: Tensor,
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    layout: Sequence[Any],
    wanted: Wanted,
) -> list[Tensor]:
    """Return the gradients by ops that have gradients themselves, one after the other."""
    product, ranks, dim, sizes, form, *_ = layout
    of_rows, of_weights, of_biases = wanted
    found = _of_ends(gradients, rows, weights, product, of_weights, of_biases)
    if not of_rows:
        return found
    total = sum((one for one in of_whole if one is not None), _of_rows(gradients, weights, product)).to(dtype)
    if not sizes:
        return [call("all_reduce", total, ranks, "duplicate", form), *found]
    return [call("reduce_scatter", total, ranks, dim, sizes, 1, 1, form), *found]


def _in_place(
    found: Sequence[Tensor], wanted: Wanted
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return gradients where the inputs stand that they are of."""
    of_rows, of_weights, of_biases = wanted
    left = iter(found)
    first = next(left) if of_rows else None
    return (
        first,
        [next(left) if one else None for one in of_weights],
        [next(left) if one else None for one in of_biases],
    )


# A product whose result is summed.


def _summed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: str, cotangent: str, *layout: Any
) -> Tensor:
    act, group = PRODUCTS_BY_NAME[product].call, _Group.of(*layout)
    if group.sizes:
        return _scattered(x, lambda rows: act(rows, weight, bias), group)
    rows = x.flatten(0, -2)
    count = group.count(len(rows))
    if count == 1:
        return _summed_where_it_is_read(x, weight, bias, product, group)
    under_way = [
        group.collectives().sum(act(part, weight, bias)) for part in rows.split(list(even_sizes(len(rows), count)))
    ]
    summed: Tensor = torch.cat([started.wait() for started in under_way]).unflatten(0, x.shape[:-1])
    return summed


def _summed_where_it_is_read(x: Tensor, weight: Tensor, bias: Tensor | None, product: str, group: _Group) -> Tensor:
    """Make a summand where the other ranks read it, if they can, and sum."""
    made = PRODUCTS_BY_NAME[product]
    place = group.collectives(is_async=False).place_of_sum(x, [*x.shape[:-1], weight.shape[made.out]])
    if place is None:
        return group.collectives(is_async=False).sum(made.call(x, weight, bias)).wait()
    made.write_product(place.value, x, weight, bias)
    return group.collectives(is_async=False).sum(place).wait()


def _scattered(x: Tensor, act: Callable[[Tensor], Tensor], group: _Group) -> Tensor:
    """Make the rows of every rank's part slice by slice; keep the sum of this rank's."""
    slices, starts = group.cut(x), group.starts
    if len(slices) == 1:
        parts = act(x).split(list(group.sizes), group.dim)
        return group.collectives(is_async=False).scatter(parts).wait()
    under_way = []
    for bounds in slices:
        taken = [x.narrow(group.dim, start + at, size) for start, (at, size) in zip(starts, bounds, strict=True)]
        parts = act(torch.cat(taken, group.dim)).split([size for _, size in bounds], group.dim)
        under_way.append(group.collectives().scatter(parts))
    return torch.cat([started.wait() for started in under_way], group.dim)


def _fake_summed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: str, cotangent: str, *layout: Any
) -> Tensor:
    made, (ranks, dim, sizes, *_) = PRODUCTS_BY_NAME[product].call(x, weight, bias), layout
    return made.new_empty(_resized(made, dim, sizes[active().position(ranks)]) if sizes else made.shape)


@dataclass(frozen=True, slots=True)
class SummedProduct(FusedOp):
    """The record of `summed_product`, whose backward communicates only where the result is not a sum that all have."""

    def _backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, *_), (name, cotangent, *layout) = gradients, ctx.saved_tensors, ctx.args
        product, (of_x, of_weight, of_bias, *_) = PRODUCTS_BY_NAME[name], ctx.needs_input_grad
        assert product.of_input is not None
        assert product.turned is not None
        ranks, dim, sizes, form, *_ = layout
        rows: Tensor | None = None
        if sizes and of_x:
            turned = [product.turned(weight)]
            rows, gradient = torch.ops.hetu.gathered_products(gradient, turned, [], LINEAR, *layout)
        elif sizes:
            gradient = call("all_gather", gradient, ranks, dim, sizes, 1, 1, "duplicate", form)
        elif cotangent == "partial":
            gradient = call("all_reduce", gradient, ranks, cotangent, form)
        if of_x and rows is None:
            rows = product.of_input(gradient, weight)
        flat = gradient.flatten(0, -2)
        return (
            rows,
            product.of_weight(x.flatten(0, -2), flat, weight) if of_weight else None,
            flat.sum(0) if of_bias else None,
            *(None for _ in ctx.args),
        )


def _no_second_derivative(*_: object) -> tuple[Tensor | None, ...]:
    raise CommError("no second derivative through gathered_products_backward\nhint: ask for it by create_graph")


_LAYOUT = "int[] ranks, int dim, SymInt[] sizes, str form"
_SLICES = "str slices"

GATHERED_PRODUCTS = GatheredProducts(
    name="gathered_products",
    summary="Products of rows, which may be gathered from `ranks` during them; also returns what is kept of the rows.",
    schema=f"(Tensor x, Tensor[] weights, Tensor[] biases, str product, {_LAYOUT}, {_SLICES}) -> Tensor[]",
    eager=_gathered_products,
    fake=_fake_gathered_products,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=3,
    backward=_no_second_derivative,
    backward_op="gathered_products_backward",
).register()

GATHERED_PRODUCTS_BACKWARD = FusedOp(
    name="gathered_products_backward",
    summary="Gives the gradients that are wanted of rows, weights and biases; that of the rows is summed meanwhile.",
    schema="(Tensor[] gradients, Tensor rows, Tensor[] weights, str product, ScalarType dtype, "
    f"bool of_rows, bool[] of_weights, bool[] of_biases, {_LAYOUT}) -> Tensor[]",
    eager=_gathered_products_backward,
    fake=_fake_gathered_products_backward,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=3,
    backward=_no_second_derivative,
    backward_op=None,
).register()

SUMMED_PRODUCT = SummedProduct(
    name="summed_product",
    summary="A product that `ranks` make summands of, slice by slice; the sum of all rows, or of the rank's part.",
    schema=f"(Tensor x, Tensor weight, Tensor? bias, str product, str cotangent, {_LAYOUT}, {_SLICES}) -> Tensor",
    eager=_summed_product,
    fake=_fake_summed_product,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=3,
    backward=_no_second_derivative,
    backward_op=None,
).register()
