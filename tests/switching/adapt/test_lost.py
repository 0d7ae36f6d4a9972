"""Devices that are lost give nothing: what they held comes from replicas that have lost none."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Sharding
from hetu_fx.annotations.states import Duplicate, Split
from hetu_fx.check.verdict import judge
from hetu_fx.errors import StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.adapt.lost import left_of
from tests.end_to_end.cells import LOSS_FNS, Mlp, mlp_batch

PAIRS = Annotation((DeviceGroup((0, 1)), DeviceGroup((2, 3))), (Sharding((Split(0, (1, 1)),)),) * 2, Duplicate(2))
TWO = Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)), Stage((3,))))), zero=0)
LEFT = Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((2, 3)),))), zero=0)


def test_groups_that_have_lost_none_are_left() -> None:
    assert left_of("w", PAIRS, {1}) == Annotation.on((2, 3), Split(0, (1, 1)))
    assert left_of("w", PAIRS, {4}) == PAIRS


def test_what_nobody_else_has_is_refused() -> None:
    for home, lost in ((PAIRS, {1, 2}), (Annotation.on((0, 1), Split(0, (1, 1))), {0})):
        with pytest.raises(StateError, match=r"'w'.*zero=0"):
            left_of("w", home, lost)


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
