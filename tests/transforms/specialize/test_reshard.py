"""Values that replicas exchange: each stage has the whole cotangent of its own before it is summed over replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.transforms.plans import deduced, program_of

PLANS = {
    "2 + 1": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),)))),
    "2 + 2": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2, 3)),)))),
    "3:1 + 2": Plan((Pipeline((Stage((0, 1), (3, 1)),)), Pipeline((Stage((2, 3)),), share=2))),
}


class DenseBlock(nn.Module):
    """As torchvision has it: each layer reads a cat of all values before it, the first one a cat of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 1, bias=False), nn.Linear(12, 3)
        self.layers = nn.ModuleList(self.layer(4 + 4 * number) for number in range(2))
        self.norm = nn.BatchNorm2d(12)

    @staticmethod
    def layer(channels: int) -> nn.Module:
        before = nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 8, 1, bias=False)
        return nn.Sequential(*before, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, bias=False))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        made = [self.stem(x)]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return nn.functional.mse_loss(self.head(self.norm(torch.cat(made, 1)).relu().mean((2, 3))), target)


class Centred(nn.Module):
    """Scales rows by their mean, which all have before products that are cut in some replicas only."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        made = self.before(x)
        made = self.up(made * made.mean(0, keepdim=True).exp())
        return nn.functional.mse_loss(self.down(made.relu()), target)


class ReadTwice(nn.Module):
    """Has a weight that two products read, which a group takes in two ways and a device alone in one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(3, 6) / 3)
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        made = (x * self.scale).sin().view(-1, 6, 1) * x.view(-1, 1, 6)
        made = made + nn.functional.linear(made, self.weight) @ self.weight
        return nn.functional.mse_loss(self.head(made.flatten(1)), target) + 0.1 * self.weight.square().sum()


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 3, 4, 4).double(), "target": torch.randn(8, 3).double()}
    return DenseBlock().double().train(), batch


def judged(plan: str, model: nn.Module, batch: dict[str, Tensor]) -> str:
    how = Lockstep()
    verdict = judge(plan, train_alone(model, [batch], how), how.train(model, [batch], PLANS[plan]), 1e-10, "")
    return verdict.verdict


@pytest.mark.parametrize("plan", PLANS)
def test_norms_over_a_cat_of_one_value_have_the_gradients_of_one_device(plan: str) -> None:
    assert judged(plan, *model_and_batch()) == "equal"


@pytest.mark.parametrize("model", [Centred, ReadTwice])
@pytest.mark.parametrize("plan", PLANS)
def test_replicas_that_cut_a_value_in_unlike_ways_have_the_gradients_of_one_device(
    plan: str, model: type[nn.Module]
) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6).double(), "target": torch.randn(8, 4).double()}
    assert judged(plan, model().double(), batch) == "equal"


@pytest.mark.parametrize("plan", PLANS)
def test_no_cotangent_of_what_replicas_exchange_stays_in_summands_inside_a_stage(plan: str) -> None:
    made = deduced(program_of(*model_and_batch()), PLANS[plan])
    exchanged = set(made.batch.exchanged)
    assert exchanged
    for layout in made.annotated.layouts:
        assert not any(exchanged & deduction.summed_cotangents for deduction in made.inside(layout))
