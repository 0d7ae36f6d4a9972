"""Experts that are spread unevenly over more devices than there are key-value heads train as on one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers.integrations import moe

from hetu_fx.cli.verdict import judge
from hetu_fx.errors import PlanError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.model_zoo import SAMPLES

TOLERANCE = 1e-10
UNEVEN = (Pipeline((Stage((0, 1, 2), (5, 2, 1)),)),)


@pytest.fixture(autouse=True)
def _all_in_double(losses_in_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's own knows no float64


def mixture() -> nn.Module:
    torch.manual_seed(17)
    sizes = {"num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": False}
    return SAMPLES["mixtral"].model(**sizes).double().train()


def test_a_mixture_with_fewer_heads_than_devices_leaves_these_whole_and_spreads_experts() -> None:
    given = [SAMPLES["mixtral"].batch(8, 11) for _ in range(2)]
    how, plan = Lockstep(partial(torch.optim.SGD, lr=0.05, momentum=0.9)), Plan(UNEVEN, split=(("*.experts.*", 0),))
    verdict = judge("plan", train_alone(mixture(), given, how), how.train(mixture(), given, plan), TOLERANCE, "")
    assert verdict.verdict == "equal", verdict


def test_heads_that_are_too_few_are_refused_where_no_split_is_asked_for() -> None:
    given = [SAMPLES["mixtral"].batch(8, 11)]
    with pytest.raises(PlanError, match="2 parts over 3 devices"):
        Lockstep().train(mixture(), given, Plan(UNEVEN))
