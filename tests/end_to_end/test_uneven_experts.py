"""Experts that are spread unevenly over more devices than there are key-value heads train as on one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers.integrations import moe

from hetu_fx.check.verdict import judge
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.planner.captured_program import PlannedProgram
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.values.options import Choice
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.model_zoo import SAMPLES
from tests.transforms.plans import program_of

TOLERANCE = 1e-10
UNEVEN = (Pipeline((Stage((0, 1, 2), (5, 2, 1)),)),)


@pytest.fixture(autouse=True)
def _all_in_double(losses_in_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's own knows no float64


WIDER = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 8, "head_dim": 16}


def mixture(**sizes: int) -> nn.Module:
    torch.manual_seed(17)
    few = {"num_key_value_heads": 2, "num_local_experts": 8, "output_router_logits": False}
    return SAMPLES["mixtral"].model(**few, **sizes).double().train()


def test_a_mixture_with_fewer_heads_than_devices_leaves_these_whole_and_spreads_experts() -> None:
    given = [SAMPLES["mixtral"].batch(8, 11) for _ in range(2)]
    how, plan = Lockstep(partial(torch.optim.SGD, lr=0.05, momentum=0.9)), Plan(UNEVEN, split=(("*.experts.*", 0),))
    verdict = judge("plan", train_alone(mixture(), given, how), how.train(mixture(), given, plan), TOLERANCE, "")
    assert verdict.verdict == "equal", verdict


def test_heads_that_are_too_few_are_refused_where_no_split_is_asked_for() -> None:
    given = [SAMPLES["mixtral"].batch(8, 11)]
    with pytest.raises(PlanError, match="2 parts over 3 devices"):
        Lockstep().train(mixture(), given, Plan(UNEVEN))


def check_equal(plan: Plan, batch: dict[str, torch.Tensor], **sizes: int) -> None:
    how = Lockstep(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    made, alone = how.train(mixture(**sizes), [batch], plan), train_alone(mixture(**sizes), [batch], how)
    verdict = judge("plan", alone, made, TOLERANCE, "")
    assert verdict.verdict == "equal", verdict


def test_a_mixture_is_planned_for_three_unequal_devices_with_experts_by_speed_and_trains_as_on_one() -> None:
    batch = SAMPLES["mixtral"].batch(8, 24)
    program = program_of(mixture(**WIDER), batch)
    planned = PlannedProgram(program, program_costs(program))
    cluster = Cluster.on_paper([2e10, 1e10, 1e10], intra=Link(4e8, 1e-6))
    whole = planned.plan(cluster, "whole experts", choice=Choice.of(forbid=("program", "pipeline")))
    assert whole.split == program.expert_splits[0]
    assert [stage.ratios for *_, stage in whole.stages] == [(2, 1, 1)]
    by_width = planned.plan(cluster, "their width", choice=Choice.of(allow="program", forbid="pipeline"))
    (stage,) = (stage for *_, stage in by_width.stages)
    splits = {region.split for region in stage.program if "experts:" in region.ops and region.is_cut}
    assert "model.layers.*.mlp.experts.down_proj:2" in splits
    assert stage.ratios[0] / sum(stage.ratios) == pytest.approx(0.5, abs=0.05)
    assert by_width.predicted is not None
    assert whole.predicted is not None
    assert by_width.predicted.seconds < whole.predicted.seconds
    for plan in (whole, by_width):
        check_equal(plan, batch, **WIDER)
