"""Planning alone: no process group, no values, nothing changed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from hetu_fx.errors import ClusterError
from hetu_fx.planner.api import plan, profile
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
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


class Reader(nn.Module):
    """A loss over sequences: an embedding, and mixing along the sequence whose work grows with its square."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.out(mixed).log_softmax(-1).gather(2, tokens.unsqueeze(-1)).mean()


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(rows, length, dtype=torch.long)}


def test_the_profile_of_a_model_is_a_file_from_which_the_same_plan_is_made(tmp_path: Path) -> None:
    cluster = paper(2, 1)
    profile(Tower(), BATCH).write(tmp_path / "profile.json")
    read = Profile.read(tmp_path / "profile.json")
    assert (read.source, read.costs.rows, read.costs.num_blocks) == ("estimate", 4096, LAYERS)
    assert make_plan(read.costs, cluster, options=PlanOptions(name="auto")) == plan(Tower(), BATCH, cluster=cluster)


def test_a_profile_tells_costs_by_the_length_of_rows() -> None:
    with torch.device("meta"):
        model = Reader()
    made = profile(model, tokens(4, 16), more=[tokens(2, 64), tokens(2, 32)])
    assert [(length, costs.rows) for length, costs in made.by_length.items()] == [(16, 4), (32, 4), (64, 4)]
    short, middle, long = (costs.whole.flops / length for length, costs in made.by_length.items())
    assert short < middle < long


def test_rows_are_the_examples_even_where_they_equal_another_size() -> None:
    made = profile(Reader(), tokens(8, 16))  # as many rows as the model is wide
    assert (made.costs.rows, made.tokens_per_row) == (8, 16)
    with_rows = plan(Reader(), tokens(8, 16), cluster=paper(1))
    assert with_rows == make_plan(made, paper(1), options=PlanOptions(name="auto"))


def test_rows_that_meet_are_told() -> None:
    assert not profile(Tower(), BATCH).mixes_rows
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert profile(norm, (torch.randn(8, 4),), loss_fn=lambda output, input: output.pow(2).mean()).mixes_rows


def test_the_search_may_be_chosen_by_name() -> None:
    cluster = paper(4, 4).with_rates({0: 3.0})
    costs = profile(Tower(), BATCH).costs
    made = plan(Tower(), BATCH, cluster=cluster, search="malleus")
    assert made == make_plan(costs, cluster, options=PlanOptions(name="auto"), search="malleus")
