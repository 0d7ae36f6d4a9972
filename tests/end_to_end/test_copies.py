"""Copies of parallel models train apart, pickles hold the plain model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hetu_fx
from hetu_fx.plans.plan import Plan
from tests.scripts.job import Job
from tests.scripts.training import batches, sgd, steps

HERE = Path()


@pytest.fixture(params=["plain", "parallel"])
def job(request: pytest.FixtureRequest) -> Job:
    return Job(None if request.param == "plain" else Plan.single(), 0, 1, HERE)


def trained(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    steps(job, model, batches(2), optimizer)
    return model, optimizer


def loss(model: nn.Module) -> float:
    return float(model(**batches(1)[0])["loss"].detach())


def test_a_copy_trains_apart_from_the_model(job: Job) -> None:
    model, optimizer = trained(job)
    copied = copy.deepcopy(model)
    before = loss(model)
    steps(job, copied, batches(2), sgd(copied))
    assert loss(model) == before
    steps(job, model, batches(1), optimizer)
    again = copy.deepcopy(copied)
    assert loss(again) == pytest.approx(loss(copied), abs=1e-12)
    assert loss(again) != pytest.approx(loss(model), abs=1e-3)


def test_a_copy_is_parallel_as_the_model_is() -> None:
    model, _ = trained(Job(Plan.single(), 0, 1, HERE))
    copied = copy.deepcopy(model)
    assert not hasattr(copied, "hetu")
    loss(copied)
    assert (copied.hetu.plan, copied.hetu.stats["steps"]) == (model.hetu.plan, 1)


def test_a_copy_may_be_given_another_plan_before_it_is_called() -> None:
    model, _ = trained(Job(Plan.single(), 0, 1, HERE))
    copied = hetu_fx.auto_parallelize(copy.deepcopy(model), batches(1)[0], plan=Plan.single())
    assert loss(copied) == pytest.approx(loss(model), abs=1e-12)


def test_averaged_models_run(job: Job) -> None:
    model, optimizer = trained(job)
    averaged = AveragedModel(model)
    for _ in range(3):
        steps(job, model, batches(1), optimizer)
        averaged.update_parameters(model)
    kept = {name: value.detach().clone() for name, value in averaged.module.named_parameters()}
    assert loss(averaged) == pytest.approx(loss(averaged), abs=1e-12)
    assert all(torch.equal(value, kept[name]) for name, value in averaged.module.named_parameters())


def test_pickles_hold_the_plain_model() -> None:
    model, _ = trained(Job(Plan.single(), 0, 1, HERE))
    for taken in (model, copy.deepcopy(model)):
        found = pickle.loads(pickle.dumps(taken))
        assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
        assert found.__dict__.keys() == type(model)().__dict__.keys()
        assert loss(found) == pytest.approx(loss(model), abs=1e-12)
