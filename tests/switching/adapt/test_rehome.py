"""Homes that are changed between steps: what one process alone can be asked."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Sharding
from hetu_fx.annotations.states import Duplicate, Split
from hetu_fx.check.verdict import judge
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import PlanError, StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.adapt.rehome import surviving_home
from tests.end_to_end.cells import LOSS_FNS, Mlp, mlp_batch
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
    rehoming.runtime.variants.set_rates({0: 3.0})
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
    told = hetu_fx.auto_parallelize(
        Line(), {"x": torch.randn(4, 3)}, plan=Plan.single(), options=hetu_fx.Options(homes_follow=False)
    )
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


PAIRS = Annotation((DeviceGroup((0, 1)), DeviceGroup((2, 3))), (Sharding((Split(0, (1, 1)),)),) * 2, Duplicate(2))
TWO = Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)), Stage((3,))))), zero=0)
LEFT = Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((2, 3)),))), zero=0)


def test_groups_that_have_lost_none_are_left() -> None:
    assert surviving_home("w", PAIRS, {1}) == Annotation.on((2, 3), Split(0, (1, 1)))
    assert surviving_home("w", PAIRS, {4}) == PAIRS


def test_what_nobody_else_has_is_refused() -> None:
    for home, lost in ((PAIRS, {1, 2}), (Annotation.on((0, 1), Split(0, (1, 1))), {0})):
        with pytest.raises(StateError, match=r"(?s)'w'.*hint: .*zero=0"):
            surviving_home("w", home, lost)


def train(lost: tuple[set[int], ...], *, zero: int = 0) -> None:
    torch.manual_seed(3)
    model, given = Mlp().double(), [mlp_batch(8, number) for number in range(3)]
    plans = tuple(Plan(plan.pipelines, zero=zero, name=str(i)) for i, plan in enumerate((TWO, LEFT)))
    how = Lockstep(
        partial(torch.optim.AdamW, lr=1e-2), loss_fn=LOSS_FNS["mlp"], plan_of_step=(0, 1, 1), lost_by_step=lost
    )
    made = how.train(model, given, plans)
    verdict = judge("plan", train_alone(model, given, how), made, 1e-10, "")
    assert verdict.verdict == "equal", verdict
    senders = {sender for change in made.moved.values() for sender, _ in change.pairs}
    assert made.moved[1].total_bytes > made.moved[2].total_bytes == 0
    assert senders.isdisjoint(lost[1])


def test_training_goes_on_as_one_device_without_what_lost_devices_held() -> None:
    train((set(), {1}, {1}))


def test_states_that_are_spread_over_replicas_are_lost() -> None:
    with pytest.raises(StateError, match="nobody else has all of"):
        train((set(), {1}, {1}), zero=1)
