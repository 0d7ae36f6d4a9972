"""What inputs must have in common: strides are said by the order of dims, so that open sizes may be anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetu_fx.base.torch_compile import Symbols
from hetu_fx.graph import meta
from hetu_fx.transforms.lowering.input_guards import Like, TensorForm, input_form

DENSE = {
    "as it was made": torch.empty(3, 4, 5),
    "transposed": torch.empty(3, 4, 5).transpose(0, 2),
    "expanded": torch.empty(3, 1, 5).expand(3, 4, 5),
    "of one": torch.empty(1, 4, 1),
    "empty": torch.empty(0, 4),
    "a number": torch.empty(()),
}
LOOSE = {
    "a part of its rows": torch.empty(3, 8)[:, :4],
    "every other": torch.empty(6)[::2],
    "with a hole": torch.empty(3, 4, 5)[:, :2],
}


def form(tensor: Tensor, *open_dims: int) -> TensorForm:
    found = input_form(Like.of(tensor), open_dims)
    assert isinstance(found, TensorForm)
    return found


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_a_dense_tensor_is_traced_with_its_strides(tensor: Tensor) -> None:
    like = Like.of(tensor)
    traced = form(tensor, *range(tensor.dim())).traced(Symbols(), like)
    assert like.is_dense
    found, expected = (
        [(n, stride) for n, stride in zip(map(meta.hint, t.shape), map(meta.hint, t.stride()), strict=True) if n > 1]
        for t in (traced, tensor)
    )
    assert found == expected


@pytest.mark.parametrize("tensor", LOOSE.values(), ids=LOOSE)
def test_a_tensor_with_gaps_is_like_its_dense_copy(tensor: Tensor) -> None:
    assert not Like.of(tensor).is_dense
    assert form(tensor, 0) == form(tensor.contiguous(), 0)


def test_open_sizes_of_at_least_two_do_not_tell_tensors_apart() -> None:
    assert form(torch.empty(3, 4), 0) == form(torch.empty(7, 4), 0)
    assert form(torch.empty(3, 4), 0) != form(torch.empty(3, 5), 0)
    assert form(torch.empty(1, 4), 0) != form(torch.empty(3, 4), 0)


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(5, 3).t(),
        torch.empty(3, 1).expand(3, 5),
        torch.empty(3, 5, dtype=torch.float64),
        torch.empty(3, 5, device="meta"),
        torch.empty(3, 5, requires_grad=True),
    ],
    ids=["another order", "expanded", "another dtype", "another device", "needs a gradient"],
)
def test_tensors_that_code_tells_apart_differ(other: Tensor) -> None:
    assert form(torch.empty(3, 5), 0, 1) != form(other, 0, 1)


def test_numbers_are_alike_and_constants_are_not() -> None:
    assert input_form(3, ()) == input_form(7, ())
    assert len({input_form(value, ()) for value in (True, False, 1.0, 2.0, None, 1)}) == 6
