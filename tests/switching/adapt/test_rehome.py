"""Homes that are changed between steps: what one process alone can be asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import PlanError, StateError
from hetu_fx.plans.plan import Plan
from tests.switching.in_threads import as_two_ranks, runtime_of


class Line(nn.Module):
    """The smallest model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean()


def test_homes_are_weighed_by_what_devices_do_now() -> None:
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single())
    rehoming = model.hetu._rehoming
    rehoming.adaptation.cluster = Cluster.on_paper((6e9,))
    rehoming.runtime.variants.go_by({0: 3.0})
    assert rehoming.weights == [2e9]
    rehoming.runtime.variants.drained = frozenset({0})
    assert rehoming.weights == [0.0]


@as_two_ranks
def test_a_step_awaits_its_backward_as_long_as_it_can_have_one(table: GroupTable) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3)}
    runtime = runtime_of(table, Line(), batch)
    loss, other = runtime.run((), batch), runtime.run((), batch)
    assert runtime.awaits_backward
    loss.backward()
    assert runtime.awaits_backward
    del other
    assert not runtime.awaits_backward
    with torch.no_grad():
        runtime.run((), batch)
    assert not runtime.awaits_backward


def test_homes_that_the_user_has_placed_follow_no_more_and_each_change_is_told() -> None:
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single())
    assert model.hetu.homes_follow
    with pytest.raises(StateError, match="no optimizer is known"):
        model.hetu.switch_home([0])
    assert model.hetu.homes_follow
    model.hetu.switch_home([0], optimizer=())
    assert not model.hetu.homes_follow
    (move,) = model.hetu.stats["homes"]
    assert (move.event, move.step, move.why, move.num_bytes) == ("moved", 0, "", 0)
    told = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single(), homes_follow=False)
    assert not told.hetu.homes_follow


def test_one_process_alone_keeps_its_state_and_cannot_be_drained() -> None:
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single())
    plan = model.hetu.switch_home([0], optimizer=())
    assert plan.total_bytes == 0
    with pytest.raises(StateError, match="would leave none"):
        model.hetu.drain(0)
    with pytest.raises(StateError, match=r"give some of 0 to 0"):
        model.hetu.switch_home({1: 1.0})
    with pytest.raises(PlanError, match="no device with one is left"):
        model.hetu.switch_home({0: 0.0})
