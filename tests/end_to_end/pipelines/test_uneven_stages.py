"""Stages of unequal devices, tensor parallel by unequal ratios, before and after a stage of one device."""

from __future__ import annotations

import pytest

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests import model_zoo

TOLERANCE = 1e-5  # the loss is made in single precision


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_sequence_parallel_stages_around_one_device_train_as_one_device(rows: int, zero: int) -> None:
    model, batch = model_zoo.llama(num_hidden_layers=3), model_zoo.causal_batch(rows, model_zoo.LENGTH)
    stages = Stage((3, 2), (3, 2)), Stage((0,)), Stage((1, 4), (3, 2))
    plan = Plan((Pipeline(stages),), zero=zero, sequence_parallel=True)
    alone, made = train_alone(model, [batch] * 2, Lockstep()), Lockstep().train(model, [batch] * 2, plan)
    verdict = judge("", alone, made, TOLERANCE, "")
    assert verdict.verdict == "equal", verdict
