"""Pipelines whose last blocks make nothing of the loss, as decoders that read what is before them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

TWO_STAGES = Pipeline((Stage((0,)), Stage((1,))))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ReadsEarly(nn.Module):
    """Takes the loss of what the second of four blocks makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        return made[1].square().mean()


@pytest.mark.parametrize(
    "plan", [Plan((TWO_STAGES,)), Plan((TWO_STAGES, Pipeline((Stage((2,)),))))], ids=["one pipeline", "two"]
)
def test_the_loss_of_an_earlier_stage_is_returned(plan: Plan) -> None:
    torch.manual_seed(0)
    model = ReadsEarly().double()
    batches = [{"x": torch.randn(rows, 6).double()} for rows in (7, 4)]
    how = Lockstep(ranks=3)
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
