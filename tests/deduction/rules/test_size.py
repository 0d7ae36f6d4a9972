"""Sizes multiply and divide symbolically."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hetu_fx.deduction.rules.size import ONE, Size, integer, product, recorded_size

S, T = Size(1, (("s", 1),), 5), Size(1, (("t", 1),), 7)


def test_products_do_not_depend_on_the_order() -> None:
    assert S.times(T).times(integer(2)) == product([integer(2), T, S])
    assert str(S.times(T).times(integer(2))) == "2*s*t"
    assert S.times(T).hint == 35


def test_division_is_exact_or_none() -> None:
    assert S.times(integer(6)).over(S.times(integer(2))) == integer(3)
    assert S.over(T) is None
    assert integer(6).over(integer(4)) is None
    assert S.over(S) == ONE


def test_a_zero_divides_nothing() -> None:
    assert integer(6).over(integer(0)) is None


def test_sizes_of_example_values_are_products_of_symbols_and_opaque_sums() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    tensor = mode.from_tensor(torch.ones(5, 7))
    rows, columns = tensor.shape
    assert recorded_size(rows * columns) == recorded_size(columns).times(recorded_size(rows))
    assert len(recorded_size(columns + 1).atoms) == 1
    assert recorded_size(columns + 1).over(recorded_size(columns)) is None
    assert recorded_size(3) == integer(3)


def test_a_sum_of_products_with_a_common_factor_is_divided_by_it() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    rows, columns = mode.from_tensor(torch.ones(5, 7)).shape
    for number in (columns - 1, (columns - 1) // 4 + 1, 2 * columns + 2):
        assert recorded_size(rows * number + rows * 0).over(recorded_size(rows)) == recorded_size(number)
    assert recorded_size(rows * columns - rows).over(recorded_size(columns - 1)) == recorded_size(rows)
