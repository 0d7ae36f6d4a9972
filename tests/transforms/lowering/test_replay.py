"""Which stages can be recorded on devices, and what hinders others; that they train: `tests/kinds/test_replay.py`."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetu_fx.base.device_types import CPU, CUDA
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.lowering.replay import hindrance
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from hetu_fx.transforms.specialize.place import Place
from tests.transforms.cases import Case
from tests.transforms.plans import device_graph

aten = torch.ops.aten
ALONE = Plan.data_parallel((0,))


def placed(case: Case, plan: Plan, rank: int = 0) -> DeviceGraph:
    """Return what a rank runs on a GPU."""
    return Place(torch.device("cuda"))(device_graph(case.program, plan, rank))


@pytest.mark.parametrize(
    "plan",
    [
        ALONE,
        Plan.data_parallel((0, 1), (3, 1)),
        Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
    ],
    ids=["1 device", "rows", "stages"],
)
def test_stages_of_one_device_are_recorded(llama: Case, plan: Plan) -> None:
    for rank in plan.devices:
        assert hindrance(placed(llama, plan, rank), CUDA) is None


def test_a_stage_that_communicates_amid_its_ops_is_not(llama: Case) -> None:
    device = placed(llama, Plan.tensor_parallel((0, 1)))
    assert hindrance(device, CUDA) == "it communicates with other ranks"


def test_devices_of_a_type_that_records_nothing_do_not(llama: Case) -> None:
    assert hindrance(placed(llama, ALONE), CPU) is not None


@pytest.mark.parametrize(
    ("op", "given", "why"),
    [
        (aten.bernoulli.default, {}, r"aten\.bernoulli\.default draws random numbers"),
        (aten.nonzero.default, {}, r"the host waits for what aten\.nonzero\.default finds"),
        (aten._local_scalar_dense.default, {}, "the host waits for"),
        (aten.ones_like.default, {"device": torch.device("cpu")}, r"aten\.ones_like\.default works on the host"),
    ],
)
def test_an_op_that_needs_the_host_hinders(llama: Case, op: Any, given: dict[str, Any], why: str) -> None:
    device = placed(llama, ALONE)
    device = replace(device, graph=copy.deepcopy(device.graph))
    first = next(node for node in device.graph.nodes if node.op == "call_function")
    with device.graph.inserting_after(first):
        device.graph.call_function(op, (first,), given)
    assert re.match(why, str(hindrance(device, CUDA)))
