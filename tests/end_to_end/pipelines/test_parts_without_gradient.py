"""Pipelines of models whose parts have no gradient: blocks after the loss, values that are read for their sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

TWO_STAGES = Pipeline((Stage((0,)), Stage((1,))))


class ReadsEarly(nn.Module):
    """Takes the loss of what the second of four blocks makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

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


class KeepsStatistics(ReadsEarly):
    """Has batch norms, whose statistics keep the last blocks in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)
        )


def test_the_loss_is_returned_where_the_last_stage_has_statistics_alone() -> None:
    torch.manual_seed(0)
    model = KeepsStatistics().double()
    batches = [{"x": torch.randn(rows, 6).double()} for rows in (7, 4)]
    how = Lockstep()
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, Plan((TWO_STAGES,))), 1e-10, "")
    assert verdict.verdict == "equal", verdict


class HalfBiased(nn.Module):
    """Adds a bias of which a part is set to zero, as attention does that has none for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.clone()
        bias[2:4].zero_()
        return torch.tanh(nn.functional.linear(x, self.weight, bias))


class HalfBiasedBlocks(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HalfBiased() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_parameter_that_is_also_read_for_its_size_has_summands_of_its_gradient() -> None:
    torch.manual_seed(0)
    model = HalfBiasedBlocks().double()
    batches = [{"x": torch.randn(rows, 6).double()} for rows in (7, 4)]
    plan = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2), Pipeline((Stage((2,)),))))
    how = Lockstep(ranks=3)
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
