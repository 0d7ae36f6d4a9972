"""Shards of one column: their gradients are views with strides, and are summed all the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

HOW = Lockstep(partial(torch.optim.AdamW, lr=1e-2))
OTHERS = {"1:1:1": Stage((3, 4, 5)), "1:1": Stage((3, 4)), "one device": Stage((3,))}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 12)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), target)


class Positions(nn.Module):
    """Attention with a table of relative positions, a column for each head, as Swin has it; all else is frozen."""

    def __init__(self, tokens: int, heads: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * tokens - 1, heads, dtype=torch.float64) / 10)
        self.query, self.key, self.value, self.last = (self.frozen(heads * width) for _ in range(4))
        places = torch.arange(tokens)
        self.register_buffer("places", (places[:, None] - places + tokens - 1).flatten())
        self.heads = heads

    @staticmethod
    def frozen(width: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(width, width), requires_grad=False)  # of another dtype: in another message

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        parts = (nn.functional.linear(x, weight.double()) for weight in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        tokens = x.shape[1]
        bias = self.table[self.places].view(tokens, tokens, self.heads).permute(2, 0, 1)
        seen = (query @ key.transpose(-1, -2) + bias).softmax(-1) @ value
        return nn.functional.mse_loss(nn.functional.linear(seen.transpose(1, 2).flatten(2), self.last.double()), target)


def check_equal(model: nn.Module, batches: list[dict[str, Tensor]], plan: Plan) -> None:
    verdict = judge("plan", train_alone(model, batches, HOW), HOW.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("other", OTHERS)
def test_columns_of_a_product_next_to_those_of_other_sizes(other: str, zero: int) -> None:
    torch.manual_seed(3)
    pipelines = Pipeline((Stage((0, 1, 2), (2, 1, 1)),)), Pipeline((OTHERS[other],))
    given = [{"x": torch.randn(8, 5).double(), "target": torch.randn(8, 12).double()} for _ in range(2)]
    check_equal(Product().double(), given, Plan(pipelines, zero=zero, split=(("layer.weight", 1),)))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_table_of_relative_positions(zero: int) -> None:
    torch.manual_seed(3)
    pipelines = Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),))
    given = [{"x": torch.randn(8, 6, 6).double(), "target": torch.randn(8, 6, 6).double()} for _ in range(2)]
    check_equal(Positions(tokens=6, heads=3, width=2), given, Plan(pipelines, zero=zero))
