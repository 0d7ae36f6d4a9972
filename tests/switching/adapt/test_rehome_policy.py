"""Homes follow a plan if that makes steps shorter by more than the move takes, and not again at once."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.rehome import LEAST_GAIN, STAY_STEPS, HomesFollow, Outlook, outlook
from hetu_fx.switching.bridge.bridge_plan import BridgeEntry
from hetu_fx.switching.migrate.in_flight import HomeEvent, InFlightState
from hetu_fx.switching.step.policy import Health

CLUSTER = Cluster.on_paper((1e9, 1e9), intra=Link(1e9))
HALVES, READ = Annotation.on((0, 1), Split(0, (1, 1))), Annotation.on((0, 1), Duplicate(2))
ENTRY = BridgeEntry("w", (4000, 4), torch.float32, HALVES, READ, READ)


@pytest.mark.parametrize(
    ("gain", "step", "move", "pays"),
    [
        (0.0, 1.0, 0.0, False),
        (LEAST_GAIN * 0.9, 1.0, 0.0, False),
        (LEAST_GAIN * 1.1, 1.0, 0.0, True),
        (LEAST_GAIN * 1.1, 1.0, LEAST_GAIN * STAY_STEPS, True),
        (LEAST_GAIN * 1.1, 1.0, LEAST_GAIN * STAY_STEPS * 1.2, False),
        (0.001, 0.0, 0.001, True),
        (-0.1, 1.0, 0.0, False),
    ],
)
def test_a_move_pays_if_it_gains_what_can_be_predicted_and_what_it_takes(
    gain: float, step: float, move: float, pays: bool
) -> None:
    assert Outlook(step, 0.5 + gain, 0.5, move).pays == pays


def test_homes_are_better_where_devices_are_fast() -> None:
    third = {"w": Annotation.on((0, 1), Split(0, (3, 1)))}
    assert outlook([ENTRY], third, 0.0, CLUSTER.with_rates({1: 3.0}), {}).gain_seconds > 0.0
    assert outlook([ENTRY], third, 0.0, CLUSTER, {}).gain_seconds < 0.0
    assert outlook([ENTRY], {"w": HALVES}, 0.0, CLUSTER.with_rates({1: 3.0}), {}).gain_seconds == 0.0


def test_a_move_is_judged_by_what_updates_take_here() -> None:
    third = {"w": Annotation.on((0, 1), Split(0, (3, 1)))}
    found = outlook([ENTRY], third, 0.0, CLUSTER, {0: 1.0, 1: 3.0})
    assert found.gain_seconds == pytest.approx(1.5, abs=0.01)


class Variants(dict[str, Any]):
    """The variants of a run, as far as following a plan looks at them."""

    pinned: str | None = None
    health = Health({1: 3.0})


class Ran:
    """A runtime of two ranks of which a plan has run, as far as following it looks at one."""

    def __init__(self) -> None:
        self.table, self.current, self.step = GroupTable(), "dp", 0
        compute, plan = SimpleNamespace(entries=(ENTRY,)), Plan.data_parallel((0, 1))
        self.variants = Variants(dp=SimpleNamespace(compute=compute, plan=plan, predicted_seconds=0.0))
        self.homes = {"w": torch.empty(ENTRY.shape)}
        self.awaits_backward, self.updates = False, (0.5, 1.5)
        self.model, self.in_flight = torch.nn.Linear(1, 1), InFlightState(self.table)
        self.moved: list[tuple[int, Annotation]] = []
        self.adaptation = SimpleNamespace(changes=[], cluster=CLUSTER)
        self.rehoming = SimpleNamespace(homes_follow=True, is_told=True, optimizers=[], weights=[3.0, 1.0])
        self.follow = HomesFollow(self, self.adaptation, self.rehoming)  # type: ignore[arg-type]

    def switch_home(self, targets: Any, optimizers: Any, *, why: str) -> Any:
        self.moved.append((self.step, targets["w"]))
        self.in_flight.events.note(HomeEvent("moved", self.step, 1, 0.0, 0.0, why))
        return SimpleNamespace(summary=lambda: "")

    def adopt(self) -> None:
        self.adaptation.changes.append(SimpleNamespace(step=self.step))

    def run(self, steps: int = 1) -> None:
        """Begin so many training steps."""
        for _ in range(steps):
            self.follow.observe(StepFacts((1,), 0, (), (0.0,), update_seconds=self.updates))
            self.step += 1


def test_homes_follow_after_the_first_step_under_a_plan_and_once() -> None:
    ran = Ran()
    ran.run(3)
    assert not ran.moved, "no plan has been made for the devices' rates"
    ran.adopt()
    ran.run(5)
    assert ran.moved == [(4, Annotation.on((0, 1), Split(0, (3000, 1000))))]


def test_homes_stay_for_a_while_before_they_follow_again() -> None:
    ran = Ran()
    for _ in range(3 * STAY_STEPS):
        ran.adopt()
        ran.run(2)
    steps = [step for step, _ in ran.moved]
    assert [later - step for step, later in itertools.pairwise(steps)] == [STAY_STEPS] * (len(steps) - 1)
    assert len(steps) > 4


def test_homes_stay_where_nothing_is_gained() -> None:
    ran = Ran()
    ran.variants.health, ran.updates = Health(), (0.5, 0.5)
    ran.adopt()
    ran.run(5)
    assert not ran.moved


@pytest.mark.parametrize("hindrance", ["awaits_backward", "pinned", "nothing kept"])
def test_homes_wait_for_a_step_between_which_they_can_follow(hindrance: str) -> None:
    ran = Ran()
    ran.awaits_backward, ran.variants.pinned = hindrance == "awaits_backward", "dp" if hindrance == "pinned" else None
    ran.variants["dp"].compute.entries = () if hindrance == "nothing kept" else (ENTRY,)
    ran.adopt()
    ran.run(4)
    assert not ran.moved
    ran.awaits_backward, ran.variants.pinned, ran.variants["dp"].compute.entries = False, None, (ENTRY,)
    ran.run()
    assert [step for step, _ in ran.moved] == [4]


def test_homes_that_the_user_has_placed_stay_until_he_hands_them_back() -> None:
    ran = Ran()
    ran.rehoming.homes_follow = False
    ran.adopt()
    ran.run(4)
    assert not ran.moved
    ran.rehoming.homes_follow = True
    ran.run(3)
    assert [step for step, _ in ran.moved] == [4], "nobody has to make another plan for that"


def test_homes_that_are_handed_back_stay_where_nothing_is_known_of_the_devices() -> None:
    ran = Ran()
    ran.adaptation.cluster, ran.rehoming.homes_follow = None, False
    ran.run(2)
    ran.rehoming.homes_follow = True
    ran.run(3)
    assert not ran.moved


def test_how_homes_would_follow_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ran = Ran()
    ran.rehoming.is_told = False
    with caplog.at_level(logging.INFO, "hetu_fx.home"):
        for _ in range(3):
            ran.adopt()
            ran.run(3)
    assert not ran.moved
    assert caplog.text.count("pass optimizer=... to hetu_fx.auto_parallelize") == 1
