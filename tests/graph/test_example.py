"""An example of a batch lies in memory as the batch does."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.graph.example import order_in_memory

X = torch.zeros(6, 4, 2)
GIVEN = {
    "whole": (X, (0, 1, 2)),
    "a part": (torch.zeros(6, 8, 3)[:, ::2, :2], (0, 1, 2)),
    "permuted": (X.permute(1, 2, 0), (2, 0, 1)),
    "expanded": (torch.zeros(1, 4, 2).expand(6, 4, 2), (0, 1, 2)),
    "expanded inside": (torch.zeros(6, 4, 1).expand(6, 4, 2), (0, 1, 2)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_order_of_dims_is_that_of_a_copy(name: str) -> None:
    tensor, order = GIVEN[name]
    assert order_in_memory(tensor) == order
    assert order_in_memory(tensor.clone()) == order
