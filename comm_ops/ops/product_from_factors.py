"""hetu::product_from_factors: a product with a weight, whose gradient is made whole on every rank from its factors.

Ranks have parts of the rows and all of the weight. Instead of a sum over ranks of gradients of the weight's size, the
backward gathers what the weight's gradient is a product of, input and gradient of the result, and every rank makes all
of it: sufficient factor broadcasting (Xie et al., 2014; HAP, EuroSys 2024, section 3.2). It pays where rows are fewer
than the weight is wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetu_fx.base.torch_private import OpOverload
from hetu_fx.comm_ops.ops.op import FusedOp, call
from hetu_fx.comm_ops.plans.choose_algorithm import always_flat
from hetu_fx.comm_ops.plans.cost import no_cost, ring_cost
from hetu_fx.errors import CommError

aten = torch.ops.aten


class Product(NamedTuple):
    """A product that can be done so: y = x w + bias, rows of y in any dims but the last; or rows of w that x names.

    Gradients of complex numbers are as torch has them: made with the conjugates of what is multiplied.

    Attributes:
        call: gives y of x, the weight and the bias (or None).
        of_input: gives the gradient of x, of that of y and the weight; None where x is what is looked up.
        add_of_input: adds that to a total, a dense one, given the gradient of y, the weight, and by what the total is
            multiplied before: by 0, whatever it is, or 1.
        turned: gives the weight by which `linear` does that, of the weight.
        of_weight: gives that of the weight, of x and of that of y, both with all rows in one dim, and of the weight.
        add_of_weight: adds that to a total, given x and the gradient of y.
        out: which dim of the weight y has.
        x, weight, bias: where the op has them among its arguments; `bias` is None for an op without.
    """

    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_input: Callable[[Tensor, Tensor], Tensor] | None
    add_of_input: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None
    turned: Callable[[Tensor], Tensor] | None
    of_weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_of_weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    out: int
    x: int
    weight: int
    bias: int | None

    def write_product(self, room: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Make y in a dense tensor, whatever that has been."""
        _add_product(room, x, weight if self.out else weight.t(), 0)
        if bias is not None:
            room += bias


def _mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _of_rows(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight.mH


def _add_product(total: Tensor, rows: Tensor, weight: Tensor, before: int) -> Tensor:
    """Add to all rows at once, where they stand."""
    total.view(-1, total.shape[-1]).addmm_(rows.flatten(0, -2), weight, beta=before)
    return total


def _add_of_rows(total: Tensor, gradient: Tensor, weight: Tensor, before: int) -> Tensor:
    return _add_product(total, gradient, weight.conj(), before)


def _add_of_turned(total: Tensor, gradient: Tensor, weight: Tensor, before: int) -> Tensor:
    return _add_product(total, gradient, weight.mH, before)


def _conjugate(weight: Tensor) -> Tensor:
    return weight.conj()


def _of_columns(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    return x.mH @ gradient


def _add_of_columns(total: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    return total.addmm_(x.mH, gradient)


def _look_up(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.embedding(x, weight)


def _of_table(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = aten.embedding_dense_backward.default(gradient, x, weight.shape[0], -1, False)
    return made


def _add_of_table(total: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    return total.add_(_of_table(x, gradient, total))


PRODUCTS: dict[OpOverload[..., Any], Product] = {
    aten.linear.default: Product(
        torch.nn.functional.linear,
        lambda gradient, weight: gradient @ weight.conj(),
        _add_of_rows,
        torch.adjoint,
        lambda x, gradient, weight: gradient.t() @ x.conj(),
        lambda total, x, gradient: total.addmm_(gradient.t(), x.conj()),
        *(0, 0, 1, 2),
    ),
    aten.addmm.default: Product(_mm, _of_rows, _add_of_turned, _conjugate, _of_columns, _add_of_columns, 1, 1, 2, 0),
    aten.mm.default: Product(_mm, _of_rows, _add_of_turned, _conjugate, _of_columns, _add_of_columns, 1, 0, 1, None),
    aten.embedding.default: Product(_look_up, None, None, None, _of_table, _add_of_table, 1, 1, 0, None),
}
"""The products whose weight's gradient can be made from factors, by the op."""

PRODUCTS_BY_NAME = {str(op): product for op, product in PRODUCTS.items()}
"""The same, by the op's name."""

_GIVEN = "Tensor x, Tensor weight, Tensor? bias"
_LAYOUT = "str product, int[] ranks, int dim, SymInt[] sizes, SymInt outer, SymInt inner"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, product: str, *cut: Any) -> Tensor:
    return PRODUCTS_BY_NAME[product].call(x, weight, bias)


def _backward(
    inputs: tuple[Any, ...], results: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    of_input, of_weight, of_bias = torch.ops.hetu.product_from_factors_backward(*gradients, *inputs)
    product = PRODUCTS_BY_NAME[inputs[3]]
    return of_input if product.of_input else None, of_weight, None if inputs[2] is None else of_bias


def _eager_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, product: str, *cut: Any
) -> tuple[Tensor, Tensor, Tensor]:
    made = PRODUCTS_BY_NAME[product]
    all_x, all_y = (call("all_gather", part, *cut, "duplicate") for part in (x, gradient))
    rows = all_y.flatten(0, -2)
    of_weight = made.of_weight(all_x.flatten(0, -2) if made.of_input else all_x.flatten(), rows, weight)
    of_input = made.of_input(gradient, weight) if made.of_input else weight.new_empty(0)
    return of_input, of_weight, weight.new_empty(0) if bias is None else rows.sum(0)


def _fake_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, product: str, *cut: Any
) -> tuple[Tensor, Tensor, Tensor]:
    none = weight.new_empty(0)
    of_input = x.new_empty(x.shape) if PRODUCTS_BY_NAME[product].of_input else none
    return of_input, weight.new_empty(weight.shape), none if bias is None else bias.new_empty(bias.shape)


def _no_second_derivative(*_: object) -> tuple[Tensor | None, ...]:
    raise CommError("no second derivative through product_from_factors\nhint: leave 'factors' out of its region")


PRODUCT_FROM_FACTORS = FusedOp(
    name="product_from_factors",
    summary="A product of rows with a weight, whose gradient is made on all `ranks` from gathered factors.",
    schema=f"({_GIVEN}, {_LAYOUT}) -> Tensor",
    eager=_product,
    fake=_product,
    cost=no_cost,
    algorithm=always_flat,
    tensors=3,
    backward=_backward,
    backward_op="product_from_factors_backward",
).register()

PRODUCT_FROM_FACTORS_BACKWARD = FusedOp(
    name="product_from_factors_backward",
    summary="Gathers rows and their gradients from `ranks`; gives the gradients of its rows, the weight and the bias.",
    schema=f"(Tensor gradient, {_GIVEN}, {_LAYOUT}) -> (Tensor, Tensor, Tensor)",
    eager=_eager_backward,
    fake=_fake_backward,
    cost=ring_cost,
    algorithm=always_flat,
    tensors=4,
    backward=_no_second_derivative,
    backward_op=None,
).register()
