"""Planning alone: no process group, no values, nothing changed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from hetu_fx.errors import ClusterError
from hetu_fx.planning import plan
from hetu_fx.plans import Plan
from tests.planner.examples import paper

LAYERS = 4


class Tower(nn.Module):
    """A loss over repeated blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


BATCH = {"x": torch.randn(4096, 32)}  # enough rows to be worth sharing


def test_a_model_without_values_is_planned_for_devices_that_are_not_there() -> None:
    with torch.device("meta"):
        model = Tower()
    made = plan(model, BATCH, cluster=paper(2, 1), name="ours")
    assert made.name == "ours"
    assert made.devices == (0, 1)
    assert made.predicted is not None
    assert all(parameter.is_meta for parameter in model.parameters())


def test_planning_changes_neither_the_model_nor_its_values() -> None:
    model = Tower()
    before = copy.deepcopy(model.state_dict())
    plan(model, BATCH, cluster=paper(2, 1))
    assert not hasattr(model, "hetu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_cluster_may_be_a_file_and_the_plan_may_be_written(tmp_path: Path) -> None:
    paper(3, 1).write(tmp_path / "cluster.json")
    made = plan(Tower(), BATCH, cluster=tmp_path / "cluster.json")
    made.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == made


def test_without_a_cluster_the_processes_at_hand_are_measured() -> None:
    assert plan(Tower(), BATCH).devices == (0,)


def test_a_missing_cluster_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no\.json"):
        plan(Tower(), BATCH, cluster=tmp_path / "no.json")
