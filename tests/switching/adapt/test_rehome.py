"""Which homes are chosen for a plan and shares, and what one process alone can be asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.rehome import choose_homes, speeds

SHAPES = {"read by 0 and 1": (64, 64), "read by 2": (64, 32), "small": (4,), "never read": (2048,)}
READ = {
    "read by 0 and 1": Annotation.on((0, 1), Split(0, (1, 1))),
    "read by 2": Annotation.on((2,)),
    "small": Annotation.on((0, 1), Duplicate(2)),
}
EXECUTION = SimpleNamespace(compute_annotations=lambda plan: READ)


def owners(weights: list[float], zero: int = 1) -> dict[str, dict[int, int]]:
    """Give the elements that each rank owns."""
    plan = Plan(Plan.data_parallel((0, 1, 2)).pipelines, zero=zero)
    homes = choose_homes(EXECUTION, plan, SHAPES, weights)
    return {
        name: {r: torch.Size(home.region(r, SHAPES[name]).local_shape).numel() for r in home.ranks}
        for name, home in homes.items()
    }


def test_homes_are_where_the_plan_reads_if_all_devices_have_a_share() -> None:
    found = owners([1.0, 1.0, 1.0])
    assert found["read by 0 and 1"] == {0: 2048, 1: 2048}
    assert found["read by 2"] == {2: 2048}
    assert len(found["small"]) == 1
    assert sum(found["never read"].values()) == 2048


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_device_without_a_share_owns_nothing_and_nothing_is_lost(left_out: int, zero: int) -> None:
    found = owners([0.0 if rank == left_out else 1.0 for rank in range(3)], zero)
    for name, shape in SHAPES.items():
        assert left_out not in found[name]
        assert sum(found[name].values()) == torch.Size(shape).numel()


def test_shares_follow_the_weights_where_homes_are_elsewhere() -> None:
    assert owners([0.0, 3.0, 1.0])["read by 0 and 1"] == {1: 3072, 2: 1024}


def test_homes_are_weighed_by_speed_where_it_is_known() -> None:
    assert speeds(None, 2) == [1.0, 1.0]
    assert speeds(Cluster.on_paper((2e9, 6e9)), 2) == [2e9, 6e9]


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


def test_a_step_awaits_its_backward_as_long_as_it_can_have_one() -> None:
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single())
    runtime = model.hetu._runtime
    loss, other = model(x=torch.randn(4, 3)), model(x=torch.randn(4, 3))
    assert runtime.awaits_backward
    loss.backward()
    assert runtime.awaits_backward
    del other
    assert not runtime.awaits_backward
    with torch.no_grad():
        model(x=torch.randn(4, 3))
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
