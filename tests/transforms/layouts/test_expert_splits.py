"""Experts are proposed as what a group splits: by speed, where their parts suit better, and run as one device."""

from __future__ import annotations

import pytest
from torch import nn

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.captured_program import PlannedProgram
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.values.options import Choice
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from tests.model_zoo import SAMPLES
from tests.transforms.plans import program_as_one_device, program_of, zoo_program

ROUNDING = 5e-5  # torch's grouped product knows no float64
SPEEDS = (5e6, 4e6, 3e6)
EXPERTS = (
    ("model.layers.*.mlp.experts.down_proj", 0),
    ("model.layers.*.mlp.experts.gate_up_proj", 0),
)


@pytest.fixture(scope="module")
def narrow() -> tuple[Program, nn.Module]:
    """Return a decoder of twelve experts that are narrower than there are heads."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 12, "num_local_experts": 12, "intermediate_size": 4}
    model = SAMPLES["mixtral"].model(**sizes, output_router_logits=False).train()
    return program_of(model, SAMPLES["mixtral"].batch(4, 11)), model


def planned(program: Program, speeds: tuple[float, ...], *forbidden: str) -> Plan:
    costs = program_costs(program, rows=1)
    choice = Choice.of(forbid=("pipeline", "context", *forbidden))
    return PlannedProgram(program, costs).plan(Cluster.on_paper(speeds), "auto", choice=choice)


def test_experts_are_what_groups_may_be_asked_to_split() -> None:
    assert zoo_program("mixtral").expert_splits == (EXPERTS,)
    assert zoo_program("llama").expert_splits == ()


def test_unequal_devices_get_experts_by_speed_and_train_as_one(narrow: tuple[Program, nn.Module]) -> None:
    program, model = narrow
    plan = planned(program, SPEEDS)
    assert plan.split == EXPERTS
    assert plan.pipelines[0].stages[0].ratios == (5, 4, 3)
    model.zero_grad()
    program_as_one_device(program, model, SAMPLES["mixtral"].batch(4, 11), plan, limit=ROUNDING)


def test_experts_are_not_proposed_where_that_is_forbidden_or_slower(narrow: tuple[Program, nn.Module]) -> None:
    assert planned(narrow[0], SPEEDS, "experts").split == ()
    assert planned(zoo_program("mixtral"), (1e6, 1e6, 1e6)).split == ()
