"""hetu::product_from_factors: gradients of all rows' product, on every rank, from parts of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetu_fx.base.dtypes import as_reals, carries_gradient
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS
from hetu_fx.comm_ops.ops.table import FUSED_OPS
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import run_in_threads

aten = torch.ops.aten
SIZES = (3, 0, 4)
CASES = [(op, torch.float64) for op in PRODUCTS] + [
    (op, torch.complex128)
    for op, product in PRODUCTS.items()
    if product.of_input  # torch looks nothing complex up
]


def given(op: object, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Give rows, the weight as the op wants it, and a bias for those that have one."""
    torch.manual_seed(1)
    if op is aten.embedding.default:
        return torch.randint(0, 6, (sum(SIZES), 2)), torch.randn(6, 5, dtype=dtype), None
    shape = (5, 6) if op is aten.linear.default else (6, 5)
    rows = (sum(SIZES), 2, 6) if op is aten.linear.default else (sum(SIZES), 6)
    bias = None if op is aten.mm.default else torch.randn(5, dtype=dtype)
    return torch.randn(rows, dtype=dtype), torch.randn(shape, dtype=dtype), bias


def gradients(op: object, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *cut: object):  # type: ignore[no-untyped-def]
    """Return the result, and the gradients of a sum of its cubes."""
    leaves = [None if t is None else t.clone().requires_grad_(carries_gradient(t.dtype)) for t in (x, weight, bias)]
    out = torch.ops.hetu.product_from_factors(*leaves, str(op), *cut)
    as_reals(out).pow(3).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves if leaf is not None]


def plain_gradients(op: Any, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return the gradients that torch itself has of the op on one device."""
    leaves = [None if t is None else t.clone().requires_grad_(carries_gradient(t.dtype)) for t in tensors]
    order = PRODUCTS[op].x, PRODUCTS[op].weight, PRODUCTS[op].bias
    args = dict(zip(order, leaves, strict=True))
    as_reals(op(*(args[place] for place in sorted(at for at in args if at is not None)))).pow(3).sum().backward()
    return [leaf.grad for leaf in leaves if leaf is not None]


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_gradients_are_torch_s_own(op: Any, dtype: torch.dtype) -> None:
    given_to = given(op, dtype)
    _, found = gradients(op, *given_to, [0], 0, [sum(SIZES)], 1, 1)
    for one, expected in zip(found, plain_gradients(op, *given_to), strict=True):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_each_rank_has_its_rows_and_all_of_the_weights_gradient(op: object, dtype: torch.dtype) -> None:
    x, weight, bias = given(op, dtype)
    expected, (of_rows, *of_weights) = gradients(op, x, weight, bias, [0], 0, [sum(SIZES)], 1, 1)

    def of_rank(table: GroupTable):  # type: ignore[no-untyped-def]
        with using(table):
            part = x.split(SIZES)[table.rank]
            return gradients(op, part, weight, bias, [0, 1, 2], 0, list(SIZES), 1, 1)

    for rank, (out, (of_part, *whole)) in enumerate(run_in_threads(len(SIZES), of_rank)):
        torch.testing.assert_close(out, expected.split(SIZES)[rank])
        assert (of_part is None) == (of_rows is None)
        if of_rows is not None:
            torch.testing.assert_close(of_part, of_rows.split(SIZES)[rank])
        torch.testing.assert_close(whole, of_weights)


@pytest.mark.parametrize("op", PRODUCTS, ids=str)
def test_on_one_rank_it_is_the_op(op: object) -> None:
    x, weight, bias = given(op)
    out, _ = gradients(op, x, weight, bias, [0], 0, [sum(SIZES)], 1, 1)
    order = PRODUCTS[op].x, PRODUCTS[op].weight, PRODUCTS[op].bias
    args = dict(zip(order, (x, weight, bias), strict=True))
    torch.testing.assert_close(
        out, op(*(args[place] for place in sorted(place for place in args if place is not None)))
    )


def test_its_backward_alone_sends() -> None:
    forward, backward = FUSED_OPS["product_from_factors"], FUSED_OPS["product_from_factors_backward"]
    assert forward.cost(1e6, (0, 1, 2), EQUAL_LINKS) == 0
    assert backward.cost(3e6, (0, 1, 2), EQUAL_LINKS) > backward.cost(3e5, (0, 1, 2), EQUAL_LINKS) > 0


@pytest.mark.parametrize("op", PRODUCTS, ids=str)
def test_torch_accepts_the_registration(op: object) -> None:
    x, weight, bias = (None if t is None else t.requires_grad_(t.is_floating_point()) for t in given(op))
    torch.library.opcheck(
        torch.ops.hetu.product_from_factors.default, (x, weight, bias, str(op), [0], 0, [sum(SIZES)], 1, 1)
    )


@pytest.mark.parametrize(("op", "dtype"), [case for case in CASES if PRODUCTS[case[0]].of_input], ids=str)
def test_products_are_made_in_a_room_whatever_that_was_and_added_to_it(op: Any, dtype: torch.dtype) -> None:
    x, weight, bias = given(op, dtype)
    product = PRODUCTS[op]
    expected = product.call(x, weight, bias)
    room = torch.full_like(expected, torch.nan)
    product.write_product(room, x, weight, bias)
    torch.testing.assert_close(room, expected)
    total = torch.full_like(x, torch.nan)
    assert product.of_input is not None
    assert product.add_of_input is not None
    assert product.add_of_input(total, expected, weight, 0) is total
    torch.testing.assert_close(total, product.of_input(expected, weight))
    product.add_of_input(total, expected, weight, 1)
    torch.testing.assert_close(total, 2 * product.of_input(expected, weight))
