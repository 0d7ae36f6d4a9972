"""Simulating alone: no process group, no values, nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.errors import ClusterError
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper

PLAN = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=4),))
BATCH = {"x": torch.randn(64, 32)}


class Tower(nn.Module):
    """A loss over repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def test_a_model_without_values_is_simulated_on_devices_that_are_not_there() -> None:
    with torch.device("meta"):
        model = Tower()
    step = hetu_fx.simulate(model, BATCH, PLAN, paper(2, 1))
    assert step.timeline.devices == (0, 1)
    assert step.link_bytes[0, 1] == step.link_bytes[1, 0] > 0
    assert "device 1: bubble" in str(step)


def test_plan_and_cluster_may_be_files_and_the_schedule_another(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    paper(2, 2).write(tmp_path / "cluster.json")
    files = tmp_path / "plan.json", tmp_path / "cluster.json"
    once = hetu_fx.simulate(Tower(), BATCH, *files)
    other = hetu_fx.simulate(Tower(), BATCH, *files, schedule="zero-bubble")
    assert other.seconds < once.seconds
    assert once.seconds == hetu_fx.simulate(Tower(), BATCH, PLAN, paper(2, 2)).seconds


def test_a_cluster_without_a_device_of_the_plan_is_refused() -> None:
    with pytest.raises(ClusterError, match="no device of rank 1"):
        hetu_fx.simulate(Tower(), BATCH, PLAN, paper(2))


def test_a_plan_with_a_program_is_simulated_op_by_op() -> None:
    program = (OpRegion("*", "rows"),)
    plan = Plan((Pipeline((Stage((0, 1), (2, 1), program=program),)),))
    step = hetu_fx.simulate(Tower(), BATCH, plan, paper(2, 1))
    rows = hetu_fx.simulate(Tower(), BATCH, Plan.data_parallel((0, 1), (2, 1)), paper(2, 1))
    assert step.seconds == pytest.approx(rows.seconds, rel=0.2)
