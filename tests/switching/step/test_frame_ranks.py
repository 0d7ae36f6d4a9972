"""Outputs besides the loss on three gloo ranks: values and gradients, also where a pipeline has no rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.plans.plan import Pipeline, Plan, Stage

WORLD = 3
UNEQUAL = Plan((Pipeline((Stage((0, 1), (2, 1)),)), Pipeline((Stage((2,)),))))
STAGES = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2), Pipeline((Stage((2,)),))))
OWNED = (0, 3, 5, 5)  # of five rows, the last rank brings none; of one row, the first brings it


class Several(nn.Module):
    """Returns rows, a sum over rows, and what no row has to do with; `centered` mixes rows in the middle."""

    def __init__(self, *, centered: bool = False, with_loss: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.centered, self.with_loss = centered, with_loss

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        y = self.second(torch.tanh(hidden - hidden.mean(0) if self.centered else hidden))
        outputs = {"y": y, "total": y.sum(0), "norm": self.second.weight.pow(2).sum()}
        return {"loss": y.pow(2).mean(), **outputs} if self.with_loss else outputs


def pair(plan: Plan, data: str, **options: bool) -> tuple[nn.Module, nn.Module]:
    """Make a model for all ranks, and the same for this one alone."""
    torch.manual_seed(0)
    model = Several(**options).double().train()
    alone = copy.deepcopy(model)
    hetu_fx.auto_parallelize(model, {"x": rows(5)}, plan=plan, data=data, outputs="all")
    return model, alone


def rows(count: int) -> Tensor:
    return torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)[:count] ** 3


def assert_same_gradients(model: nn.Module, alone: nn.Module) -> None:
    for home, plain in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(home.grad.full_tensor(), plain.grad)


def loss_of_rank(outputs: dict[str, Tensor], rank: int) -> Tensor:
    return outputs["y"].pow(2).sum() + (rank + 1) * outputs["total"].sum() + (rank + 2) * outputs["norm"]


def check_losses_of_outputs(rank: int, world: int, folder: Path) -> None:
    """Each rank has a loss of its own; their mean is trained on."""
    model, alone = pair(UNEQUAL, "per_rank")
    for count in (5, 1):
        model.zero_grad()
        alone.zero_grad()
        cuts = [min(cut, count) for cut in OWNED]
        loss_of_rank(model(rows(count)[cuts[rank] : cuts[rank + 1]]), rank).backward()
        whole = alone(rows(count))
        parts = [{**whole, "y": whole["y"][cuts[i] : cuts[i + 1]]} for i in range(world)]
        torch.stack([loss_of_rank(part, i) for i, part in enumerate(parts)]).mean().backward()
        assert_same_gradients(model, alone)


def check_outputs_of_micro_batches(rank: int, world: int, folder: Path) -> None:
    assert_same_outputs(*pair(STAGES, "global", with_loss=True))


def check_rows_that_meet_in_the_middle(rank: int, world: int, folder: Path) -> None:
    """With one row, the second pipeline has none, and takes part in the mean all the same."""
    assert_same_outputs(*pair(UNEQUAL, "global", with_loss=True, centered=True))


def assert_same_outputs(model: nn.Module, alone: nn.Module) -> None:
    for count in (5, 1):
        model.zero_grad()
        alone.zero_grad()
        model(rows(count))["loss"].backward()
        alone(rows(count))["loss"].backward()
        assert_same_gradients(model, alone)
        with torch.no_grad():
            torch.testing.assert_close(dict(model(rows(count))), alone(rows(count)))


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
