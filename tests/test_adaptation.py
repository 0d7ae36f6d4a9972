"""A new plan becomes a variant only if no variant does the same work already."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.adaptation import Adaptation, name_for
from hetu_fx.plans import Plan
from hetu_fx.prediction import Prediction
from hetu_fx.topology import Cluster
from tests.planner.examples import paper


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
    made.planner = lambda cluster, name: replace(plan, name=name)
    return made


@pytest.mark.parametrize(
    ("rates", "name"),
    [({0: 1.0, 1: 1.0}, "healthy"), ({0: 1.0, 1: 2.5}, "slow-1x2.5"), ({2: 3.0, 1: 1.25}, "slow-1x1.25-2x3")],
)
def test_variants_are_named_for_their_slow_devices(rates: dict[int, float], name: str) -> None:
    assert name_for(rates) == name


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
    adaptation.planner = lambda cluster, _: replace(Plan.single(), zero=0)
    assert adaptation.replan({0: 2.002}) == name
    assert len(adaptation.runtime.variants) == 2


def test_planners_are_asked_for_the_devices_as_they_are() -> None:
    asked: list[Cluster] = []
    adaptation = adaptation_with(Plan.single())

    def planner(cluster: Cluster, name: str) -> Plan:
        asked.append(cluster)
        return Plan.single()

    adaptation.planner = planner
    adaptation.replan({0: 2.0})
    assert asked[0].device(0).rate == 2.0


@pytest.mark.parametrize("name", ["", "..", "../out", "a\\b", "nul\0"])
def test_a_variant_that_could_not_be_a_folder_is_refused(name: str) -> None:
    runtime = adaptation_with(Plan.single()).runtime
    with pytest.raises(hetu_fx.HetuFxError, match="cannot be named"):
        runtime.add_variant(Plan.single(), name)
