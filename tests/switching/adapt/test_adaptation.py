"""A new plan becomes a variant only if no variant does the same work already."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import CheckError, PlanError
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.switching.adapt.adaptation import (
    CALIBRATED,
    Adaptation,
    at_speeds,
    calibrate_cluster,
    compute_seconds,
    expected_seconds,
)
from hetu_fx.switching.adapt.health import HealthTracker
from hetu_fx.switching.adapt.replanning import Conditions, MadePlan, PlanRequest
from hetu_fx.switching.adapt.tried import NOT_TRIED, TrialResult, TryPlan
from hetu_fx.switching.step.step_report import LastStep
from tests.planner.examples import paper, rising, transformer


class Line(nn.Module):
    """The smallest model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean()


def adaptation_with(plan: Plan) -> Adaptation:
    """Make an adaptation whose planner always finds `plan`."""
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single())
    made: Adaptation = model.hetu._adaptation
    made.cluster = paper(1)
    made.replanning.planner = lambda cluster, name: replace(plan, name=name)
    return made


def test_drained_devices_are_planned_without() -> None:
    asked: list[Cluster] = []
    adaptation = adaptation_with(Plan.single())
    adaptation.cluster = Cluster.on_paper((1e9, 1e9, 1e9))
    adaptation.runtime.variants.drained = frozenset({1})
    adaptation.replanning.planner = lambda cluster, name: asked.append(cluster) or replace(Plan.single(), name=name)
    adaptation.replan({1: 3.0, 2: 2.0})
    assert asked[0].ranks == (0, 2)
    assert asked[0].device(2).rate == 2.0
    assert adaptation.runtime.variants.health.rates == {2: 2.0}


def test_a_plan_that_a_variant_runs_already_makes_no_new_variant() -> None:
    adaptation = adaptation_with(Plan.single())
    runtime = adaptation.runtime
    (only,) = runtime.variants
    assert adaptation.replan({0: 2.0}) == only
    assert list(runtime.variants) == [only]
    assert runtime.variants[only].planned_rates == {0: 2.0}


def test_a_variant_that_stays_is_expected_to_take_what_the_new_plan_does() -> None:
    slower = Prediction(seconds=7.0)
    adaptation = adaptation_with(replace(Plan.single(), predicted=slower))
    name = adaptation.replan({0: 2.0})
    assert adaptation.runtime.variants[name].predicted_seconds == 7.0


def test_another_plan_becomes_a_variant_of_its_own() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe"))
    assert adaptation.replan({0: 2.0}) == "slow-0x2"
    assert "slow-0x2" in adaptation.runtime.variants


def test_rates_of_one_name_run_the_variant_that_has_it() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe"))
    name = adaptation.replan({0: 2.001})
    adaptation.replanning.planner = lambda cluster, _: replace(Plan.single(), zero=0)
    assert adaptation.replan({0: 2.002}) == name
    assert len(adaptation.runtime.variants) == 2


def test_planners_are_asked_for_the_devices_as_they_are() -> None:
    asked: list[Cluster] = []
    adaptation = adaptation_with(Plan.single())

    def planner(cluster: Cluster, name: str) -> Plan:
        asked.append(cluster)
        return Plan.single()

    adaptation.replanning.planner = planner
    adaptation.replan({0: 2.0})
    assert asked[0].device(0).rate == 2.0


def test_a_stage_in_chunks_is_expected_to_compute_the_blocks_that_it_holds() -> None:
    """Of blocks of 1 to 4 units the first stage has the first and the third: 4 as the other has 6, and not 3 and 7."""
    costs, cluster = rising(transformer(rows=4)), paper(8, 8)
    two = (Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)
    whole = expected_seconds(Plan(two), costs, (4,), cluster)
    dealt = expected_seconds(Plan(two, schedule="interleaved", chunks=2), costs, (4,), cluster)
    unit = whole[1] - dealt[1]
    assert dealt[0] - whole[0] == pytest.approx(unit)
    assert whole[0] == pytest.approx(3 * unit, rel=0.1), "and what stands before all blocks"


@pytest.mark.parametrize("name", ["", "..", "../out", "a\\b", "nul\0"])
def test_a_variant_that_could_not_be_a_folder_is_refused(name: str) -> None:
    runtime = adaptation_with(Plan.single()).runtime
    with pytest.raises(hetu_fx.HetuFxError, match="cannot be named"):
        runtime.add_variant(Plan.single(), name)


@pytest.mark.parametrize(
    ("normals", "speeds"),
    [
        ({0: 2.0, 1: 1.0}, (4e9, 4e9)),
        ({0: 1.0, 1: 0.995}, (8e9, 4.02e9)),
        ({0: 1.0, 1: 0.505}, (7.96e9, 7.96e9)),
        ({1: 2.0}, (8e9, 2e9)),
    ],
)
def test_speeds_are_corrected_to_those_that_would_have_been_expected(
    normals: dict[int, float], speeds: tuple[float, float]
) -> None:
    found = calibrate_cluster(Cluster.on_paper((8e9, 4e9)), normals)
    assert tuple(device.flops_per_second for device in found.devices) == speeds


def test_a_plan_that_corrected_speeds_make_faster_becomes_a_variant() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe", predicted=Prediction(1e-9)))
    adaptation.calibrate(expecting(adaptation, 1.0), {0: 2.0})
    assert list(adaptation.runtime.variants) == ["variant0"], "it is being planned"
    take_over(adaptation)
    assert list(adaptation.runtime.variants) == ["variant0", CALIBRATED]
    assert adaptation.runtime.variants[CALIBRATED].planned_rates == {}


def test_a_plan_that_corrected_speeds_make_hardly_faster_is_left_alone() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe", predicted=Prediction(1e9)))
    adaptation.calibrate(expecting(adaptation, 1.0), {0: 2.0})
    take_over(adaptation)
    assert list(adaptation.runtime.variants) == ["variant0"]
    assert adaptation.plans[Conditions()] == adaptation.runtime.variants["variant0"].plan


def test_plans_are_expected_to_take_what_they_do_at_corrected_speeds() -> None:
    adaptation = adaptation_with(replace(Plan.single(), predicted=Prediction(1e9)))
    cluster = expecting(adaptation, 1.0)
    adaptation.calibrate(cluster, {0: 1.0})
    before = adaptation.runtime.variants["variant0"].predicted_seconds
    adaptation.calibrate(cluster, {0: 3.0})
    assert 1.0 > adaptation.runtime.variants["variant0"].predicted_seconds > before


def test_devices_are_calibrated_once_and_only_where_the_speeds_were_measured() -> None:
    for calibrates, times in ((True, 1), (False, 0)):
        adaptation = adaptation_with(Plan.single())
        adaptation._calibrates = calibrates
        speeds = {adaptation.cluster}
        for _ in range(24):
            adaptation.runtime.report.variant, adaptation.runtime.report.rows = "variant0", (4,)
            adaptation.observe(StepFacts(rows=(4,), longest=0, counts=(), compute_seconds=(0.5,)))
            speeds.add(adaptation.cluster)
        assert len(speeds) == 1 + times


def test_a_slow_device_is_planned_for_while_steps_go_on() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe"))
    adaptation.adapt({0: 2.0})
    assert adaptation.is_planning
    assert adaptation.runtime.variants.health.rates == {0: 2.0}, "the policy goes by it at once"
    take_over(adaptation)
    assert not adaptation.is_planning
    assert adaptation.runtime.variants["slow-0x2"].planned_rates == {0: 2.0}
    (change,) = adaptation.changes
    assert (change.rates, change.variant) == ({0: 2.0}, "slow-0x2")
    assert change.planning_seconds > 0


def test_a_situation_that_returns_is_not_planned_again() -> None:
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe"))
    adaptation.plans[Conditions()] = Plan.single()
    adaptation.adapt({0: 2.0})
    take_over(adaptation)
    for rate in (1.0, 2.01):
        adaptation.adapt({0: rate})
        assert not adaptation.is_planning
    assert [change.variant for change in adaptation.changes] == ["slow-0x2", "variant0", "slow-0x2"]
    assert adaptation.runtime.variants["slow-0x2"].planned_rates == {0: 2.0}, "what it was planned for"


def slow_and_known(rate: float) -> Adaptation:
    """Make an adaptation that runs a plan for a device at a rate, which is now known as a little more."""
    adaptation = adaptation_with(replace(Plan.single(), schedule="gpipe", predicted=Prediction(1e-3)))
    adaptation.adapt({0: rate})
    take_over(adaptation)
    adaptation.runtime.current = adaptation.changes[-1].variant
    adaptation.adapt({0: 1.03 * rate})
    return adaptation


def test_a_rate_that_is_known_better_is_planned_for_while_the_plan_for_about_it_runs() -> None:
    adaptation = slow_and_known(2.0)
    assert adaptation.is_planning
    assert [change.variant for change in adaptation.changes] == ["slow-0x2", "slow-0x2"], "the plan for about it"
    faster = replace(Plan.single(), zero=0, predicted=Prediction(1e-12))
    adaptation.replanning.take = lambda: (_asked(adaptation), MadePlan(faster))
    adaptation._take_over()
    assert [change.variant for change in adaptation.changes] == ["slow-0x2", "slow-0x2", "slow-0x2.06"]


def test_a_plan_for_a_rate_that_is_known_better_is_left_alone_where_it_gains_little() -> None:
    adaptation = slow_and_known(2.0)
    runs = adaptation.runtime.variants["slow-0x2"]
    as_fast = expect(runs.plan, adaptation.costs, adaptation.cluster.with_rates({0: 2.06}))
    adaptation.replanning.take = lambda: (_asked(adaptation), MadePlan(replace(runs.plan, zero=0, predicted=as_fast)))
    adaptation._take_over()
    assert [change.variant for change in adaptation.changes] == ["slow-0x2", "slow-0x2"]
    assert runs.planned_rates == {0: 2.06}
    assert runs.predicted_seconds == as_fast.seconds, "what it takes at the rate that is known now"
    assert adaptation.plans[Conditions.of({0: 2.06})] == runs.plan


def _asked(adaptation: Adaptation) -> PlanRequest:
    assert adaptation.replanning.asked is not None
    return adaptation.replanning.asked


def test_a_device_that_became_slow_under_a_pinned_variant_is_planned_for_when_that_is_released() -> None:
    adaptation = adaptation_with(Plan.single())
    adaptation.cluster = paper(1, 1)  # the other one could take its work
    runtime = adaptation.runtime
    adaptation.tracker = HealthTracker(window=1, patience=1)
    adaptation.tracker._device(0).first = [1.0] * adaptation.tracker.settling
    adaptation._calibrates = False
    runtime.report.variant, runtime.report.rows = "variant0", (4,)
    facts = StepFacts((4,), longest=0, counts=(), compute_seconds=(1e9,))
    runtime.variants.pin("variant0")
    for _ in range(3):
        adaptation.observe(facts)
    assert adaptation.rates[0] > 2
    assert not adaptation.is_planning
    runtime.variants.pin(None)
    adaptation.observe(facts)
    assert adaptation.is_planning


def test_a_planner_that_fails_is_told_and_leaves_all_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    adaptation = adaptation_with(Plan.single())

    def planner(cluster: Cluster, name: str) -> Plan:
        raise PlanError("no plan fits")

    adaptation.replanning.planner = planner
    adaptation.adapt({0: 2.0})
    take_over(adaptation)
    assert "no plan for 'slow-0x2', training goes on as planned before: PlanError: no plan fits" in caplog.text
    assert list(adaptation.runtime.variants) == ["variant0"]


def trying(try_plan: TryPlan, monkeypatch: pytest.MonkeyPatch) -> Adaptation:
    """Make an adaptation whose planner finds another plan than the one that runs, and whose plans are tried."""
    monkeypatch.setattr(
        "hetu_fx.api.make_try_plan", lambda *given: lambda plan: try_plan(plan) if plan.name else NOT_TRIED
    )
    model = hetu_fx.auto_parallelize(Line(), {"x": torch.randn(4, 3)}, plan=Plan.single(), check=True)
    made: Adaptation = model.hetu._adaptation
    made.cluster = paper(1)
    made.replanning.planner = lambda cluster, name: replace(Plan.single(), schedule="gpipe", name=name)
    return made


def wrong(plan: Plan) -> TrialResult:
    """Try a plan, and find it wrong."""
    raise CheckError(f"the plan {plan.name} does not give what one device gives")


def test_a_plan_that_is_made_while_training_is_tried_and_what_was_found_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = os.getpid()
    adaptation = trying(lambda plan: TrialResult(f"tried, {os.getpid() == here} that it was here"), monkeypatch)
    adaptation.adapt({0: 2.0})
    take_over(adaptation)
    variants = adaptation.runtime.variants
    assert adaptation.tried.found(variants["slow-0x2"].plan).says == "tried, False that it was here"


def test_a_plan_that_is_made_while_training_and_is_wrong_is_told_and_no_variant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adaptation = trying(wrong, monkeypatch)
    adaptation.adapt({0: 2.0})
    take_over(adaptation)
    assert "training goes on as planned before: CheckError: the plan slow-0x2 does not give what one" in caplog.text
    assert list(adaptation.runtime.variants) == ["variant0"]
    assert not adaptation.plans


def test_a_plan_that_is_made_while_all_wait_and_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    adaptation = trying(wrong, monkeypatch)
    with pytest.raises(CheckError, match="slow-0x2 does not give"):
        adaptation.replan({0: 2.0})
    assert list(adaptation.runtime.variants) == ["variant0"]


def take_over(adaptation: Adaptation) -> None:
    """Let the plan that is being made become ready, and be taken over before a step."""
    while not adaptation.tell()["has_plan"]:
        time.sleep(0.001)
    adaptation.observe(StepFacts((1,), longest=0, counts=(), compute_seconds=(0.0,), has_plan=True))


def test_rates_are_learnt_of_sequences_by_the_work_of_their_parts_without_another_plan() -> None:
    adaptation, report = adaptation_with(replace(Plan.single(), schedule="gpipe")), LastStep("variant0")
    adaptation.cluster = Cluster.on_paper((1e9, 1e9))
    adaptation.runtime.report, adaptation._calibrates = report, False
    for step in range(24):
        work = {0: 1.0 + step % 3, 1: 2.0 - step % 2}  # other sequences in each step
        report.work = lambda cluster, work=work: work  # type: ignore[misc]
        slow = 3.0 if step > 8 else 1.0
        facts = StepFacts(rows=(4, 4), longest=9, counts=(), compute_seconds=(0.1 * work[0], 0.2 * work[1] * slow))
        adaptation.observe(facts)
    assert adaptation.rates == {0: 1.0, 1: 3.0}
    assert adaptation.runtime.variants.health.rates == {0: 1.0, 1: 3.0}
    assert list(adaptation.runtime.variants) == ["variant0"]


def expecting(adaptation: Adaptation, seconds: float) -> Cluster:
    """Let the running variant be expected to take so long; return the cluster."""
    assert adaptation.cluster is not None
    adaptation.runtime.variants["variant0"].expect(Prediction(seconds), {})
    return adaptation.cluster


PLAN = Plan((Pipeline((Stage((0, 1), (2, 1), program=(OpRegion("*", "rows"),)),)),))
PREDICTED = Prediction(
    5.0, (DeviceCost(0, (("compute", 4.0), ("idle", 1.0)), ()), DeviceCost(1, (("compute", 5.0), ("idle", 0.0)), ()))
)


def test_devices_are_expected_to_compute_what_was_predicted_for_so_much_of_the_batch() -> None:
    assert compute_seconds(replace(PLAN, predicted=PREDICTED), 0.5) == {0: 2.0, 1: 2.5}
    assert compute_seconds(PLAN, 1.0) == {}


def test_at_other_speeds_work_takes_longer_and_the_step_as_much_longer_as_the_device_that_is_slowed_most() -> None:
    before, after = Cluster.on_paper([2e9, 1e9]), Cluster.on_paper([1e9, 1.25e9])
    found = at_speeds(PREDICTED, before, after)
    assert found.seconds == pytest.approx(10.0)
    assert [dict(device.seconds)["compute"] for device in found.devices] == pytest.approx([8.0, 4.0])
    assert dict(found.devices[0].seconds)["idle"] == 1.0
