"""What steps under programs are expected to take where only a prediction for other speeds is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.program import OpRegion
from hetu_fx.switching.adapt.of_programs import at_speeds, compute_seconds

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
