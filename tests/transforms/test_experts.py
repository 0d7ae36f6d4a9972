"""Experts spread over devices, evenly or not: loss and gradients of one device, one sum per block each way."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.model_zoo import SAMPLES, example
from tests.oracles.traffic import Traffic, traffic_by_block
from tests.transforms.plans import deduced, program_as_one_device, program_of, zoo_program

EXPERTS = (("*.experts.*", 0),)
PLANS = {
    "5 experts 3:2": Plan.tensor_parallel((0, 1), (3, 2)),
    "5 experts 1:4": Plan.tensor_parallel((0, 1), (1, 4)),
    "5 experts 2:2:1": Plan.tensor_parallel((0, 1, 2), (2, 2, 1)),
}
ROUNDING = 5e-5  # torch's grouped product knows no float64


@functools.cache
def without_router_loss() -> tuple[nn.Module, Program]:
    model = SAMPLES["mixtral"].model(output_router_logits=False).train()
    return model, program_of(model, example("mixtral"))


def trained(plan: Plan, rows: int = 4) -> dict[int, DeviceGraph]:
    model, program = without_router_loss()
    model.zero_grad()
    batch = SAMPLES["mixtral"].batch(rows, 11)
    return program_as_one_device(program, model, batch, replace(plan, split=EXPERTS), limit=ROUNDING)


@pytest.mark.parametrize("plan", PLANS)
def test_each_device_has_its_experts_and_together_they_are_the_model(plan: str) -> None:
    trained(PLANS[plan])


def test_devices_whose_experts_get_no_rows_add_nothing() -> None:
    trained(PLANS["5 experts 2:2:1"], rows=1)


def test_what_experts_make_is_summed_once_after_it_is_put_together() -> None:
    _, program = without_router_loss()
    found = traffic_by_block(trained(PLANS["5 experts 3:2"])[0], program.graph.block_paths)
    assert found[0].forward == {"all_reduce": 2}
    # backward: the inputs of attention and of the experts; their weights' cotangents flow on to the latter
    assert found[0].backward == Traffic({}, {"all_reduce": 2}).backward


def test_experts_of_a_group_that_shares_the_sequence_gather_once_and_scatter_once_each_way() -> None:
    _, program = without_router_loss()
    plan = replace(PLANS["5 experts 3:2"], split=EXPERTS, sequence_parallel=True)
    found = traffic_by_block(trained(plan)[0], program.graph.block_paths)
    assert found[1] == Traffic(*[{"all_gather": 2, "reduce_scatter": 2}] * 2)


def test_parameters_of_experts_are_cut_by_expert() -> None:
    program = zoo_program("mixtral")
    made = deduced(program, replace(PLANS["5 experts 2:2:1"], split=EXPERTS))
    layout = made.annotated.layouts[0]
    shapes = {
        leaf.name: [
            made.value_annotation(leaf.node, layout).local_shape(rank, made.shape(leaf.node)) for rank in (0, 2)
        ]
        for leaf in made.parameters()
        if "layers.1.mlp.experts" in leaf.name
    }
    assert shapes == {
        "model.layers.1.mlp.experts.gate_up_proj": [(2, 224, 48), (1, 224, 48)],
        "model.layers.1.mlp.experts.down_proj": [(2, 48, 112), (1, 48, 112)],
    }


def test_what_a_plan_cannot_split_is_refused_by_name() -> None:
    program = program_of(torch.nn.Linear(6, 5), (torch.randn(4, 6),))
    for split in ((("*.experts.*", 0),), (("weight", 2),)):
        with pytest.raises(PlanError, match=r"has such a dim that can be\nhint: the parameters are "):
            deduced(program, Plan((Plan.tensor_parallel((0, 1)).pipelines[0],), split=split))


def test_more_devices_than_experts_are_refused() -> None:
    program = program_of(SAMPLES["mixtral"].model(num_key_value_heads=6).train(), SAMPLES["mixtral"].batch(4, 11))
    with pytest.raises(PlanError, match=r"5 parts over 6 devices .*experts"):
        deduced(program, replace(Plan.tensor_parallel(range(6)), split=EXPERTS))
