"""A Trainer's loss of a parallel model is that of one device, whether or not it is divided by a count of items."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx import LossType
from hetu_fx.integrations import unpatch
from hetu_fx.integrations.transformers import _counting_processes_once

PROCESSES = 4
BATCH = {"x": torch.linspace(-1, 1, 24).reshape(4, 6), "num_items_in_batch": torch.tensor(8.0)}


class Mean(nn.Module):
    """Takes the count, and leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, **options: Any) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Counted(Mean):
    """Divides by the count."""

    def forward(self, x: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().sum() / num_items_in_batch}


@pytest.fixture(autouse=True)
def _originals_come_back() -> Iterator[None]:
    yield
    unpatch()


def trainer(**changes: Any) -> Any:
    usual = {"model_accepts_loss_kwargs": True, "label_smoother": None, "compute_loss_func": None}
    return SimpleNamespace(accelerator=SimpleNamespace(num_processes=PROCESSES), **{**usual, **changes})


def multiplied(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """Do what transformers does."""
    outputs = model(**inputs)
    loss = outputs["loss"] * PROCESSES
    return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(("kind", "loss_type"), [(Mean, LossType.MEAN), (Counted, LossType.SUM)])
def test_what_is_multiplied_is_divided_unless_the_loss_is_a_sum(kind: type[Mean], loss_type: LossType) -> None:
    model = hetu_fx.auto_parallelize(kind(), BATCH, plan=hetu_fx.Plan.single(0))
    expected = float(model(**BATCH)["loss"].detach()) * (PROCESSES if loss_type is LossType.SUM else 1)
    assert model.hetu.loss_type is loss_type
    compute = _counting_processes_once(multiplied)
    assert float(compute(trainer(), model, BATCH, num_items_in_batch=8).detach()) == pytest.approx(expected)
    loss, outputs = compute(trainer(), model, BATCH, return_outputs=True, num_items_in_batch=8)
    assert float(loss.detach()) == pytest.approx(expected)
    assert set(outputs) == {"loss"}


@pytest.mark.parametrize("changes", [{"label_smoother": object()}, {"compute_loss_func": len}])
def test_a_loss_of_the_trainers_own_stays_as_it_is(changes: dict[str, Any]) -> None:
    model = hetu_fx.auto_parallelize(Mean(), BATCH, plan=hetu_fx.Plan.single(0))
    expected = float(model(**BATCH)["loss"].detach()) * PROCESSES
    found = _counting_processes_once(multiplied)(trainer(**changes), model, BATCH, num_items_in_batch=8)
    assert float(found.detach()) == pytest.approx(expected)


def test_a_module_that_runs_as_it_is_has_a_loss_of_which_nothing_is_known() -> None:
    model = hetu_fx.auto_parallelize(Mean(), BATCH, plan=hetu_fx.Plan.single(0), capture="eager")
    model(**BATCH)
    assert model.hetu.loss_type is None


def test_plain_models_are_left_to_the_trainer() -> None:
    model = Mean()
    found = _counting_processes_once(multiplied)(trainer(), model, BATCH, num_items_in_batch=8)
    assert float(found.detach()) == pytest.approx(PROCESSES * float(model(**BATCH)["loss"].detach()))
