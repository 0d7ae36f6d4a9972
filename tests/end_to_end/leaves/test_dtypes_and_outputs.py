"""What a leaf returns, and in which dtypes it is called: as on one device, or in those of its capture."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.end_to_end.leaves.kinds import WIDTH, Model, batch_of, made
from tests.end_to_end.leaves.test_leaves import PLANS, trains_as_alone


@dataclass
class Sorted:
    """Rows, and their order by size."""

    rows: Tensor
    order: Tensor


class Sorts(nn.Module):
    """Returns numbers, whole numbers and truths, in a dataclass in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> tuple[Sorted, Tensor]:
        rows = self.layer(h) if float(h.abs().max()) < 99 else h
        return Sorted(rows, rows.sum(1).argsort()), rows > 0


class Uses(nn.Module):
    """Uses all that a part returns."""

    def __init__(self) -> None:
        super().__init__()
        self.part = hetu_fx.leaf(Sorts())

    def forward(self, h: Tensor) -> Tensor:
        made, is_positive = self.part(h)
        return torch.where(is_positive, made.rows[made.order], 0.1 * made.rows)


@pytest.mark.parametrize("plan", ["rows 3:1", "mixed"])
def test_whole_numbers_and_truths_in_a_dataclass_are_those_of_one_device(plan: str) -> None:
    torch.manual_seed(0)
    trains_as_alone(Model(middle=Uses()).double(), PLANS[plan])


def of_float32() -> dict[str, Tensor]:
    return {name: x.float() if x.is_floating_point() else x for name, x in batch_of(8).items()}


@pytest.mark.parametrize("kind", ["experts", "dice", "numpy"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_in_a_stage_of_a_low_dtype_it_is_called_in_the_dtypes_of_its_capture(kind: str, replicas: int) -> None:
    model, part = made(kind)
    hetu_fx.leaf(part)
    model, batches = model.float(), [of_float32()]
    plan = Plan(tuple(Pipeline((Stage((rank,), dtype="bfloat16"),)) for rank in range(replicas)))
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, plan)
    assert found.steps[0].loss != alone.steps[0].loss
    assert found.steps[0].loss == pytest.approx(alone.steps[0].loss, rel=1e-2)
    for name, gradient in alone.steps[0].gradients.items():
        error = found.steps[0].gradients[name] - gradient
        assert error.norm() < 0.05 * gradient.norm() + 1e-3, name


class Casts(nn.Module):
    """Has a part called under autocast, which its own products obey."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer = hetu_fx.leaf(Sorts()), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made, _ = self.part(self.layer(h))
        return made.rows.float()


def test_under_autocast_in_the_forward_it_casts_as_on_one_device() -> None:
    torch.manual_seed(0)
    model, batches = Model(middle=Casts()).float(), [of_float32()]
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, PLANS["rows 3:1"])
    assert found.steps[0].loss == pytest.approx(alone.steps[0].loss, rel=1e-5)
    for name, gradient in alone.steps[0].gradients.items():
        torch.testing.assert_close(found.steps[0].gradients[name], gradient, rtol=2e-2, atol=2e-3, msg=name)
