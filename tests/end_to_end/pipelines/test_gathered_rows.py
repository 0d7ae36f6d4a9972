"""Rows of the whole batch, put together in one stage and read in a later one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage


class Block(nn.Module):
    """Runs over all rows, takes a product of each, and runs over all rows again."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.logcumsumexp(0)).logcumsumexp(0)


class Blocks(nn.Module):
    """Some of them, so that stages begin where rows are together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse_loss(x, y)


def test_rows_that_a_stage_has_put_together_reach_the_next_one() -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    batches = [{"x": torch.randn(rows, 8).double(), "y": torch.randn(rows, 8).double()} for rows in (7, 4)]
    plan = Plan((Pipeline((Stage((0,)), Stage((1,)))),))
    alone, made = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, plan)
    verdict = judge("", alone, made, 1e-10, "")
    assert verdict.verdict == "equal", verdict
