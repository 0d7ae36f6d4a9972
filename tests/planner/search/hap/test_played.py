"""Steps under plans with programs, on paper, beside simulations of the plans that do the same without one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES
from hetu_fx.errors import PlanError
from hetu_fx.planner.captured_program import PlannedProgram
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction
from tests.planner.search.nets import convolutions

MEETING = 1e-3


def cluster(*, meeting: float = MEETING, bytes_per_second: float = 1e9) -> Cluster:
    """Return two unequal devices whose hosts, memory, ops and meetings take what those of real ones do."""
    found = Cluster.on_paper([2e10, 1e10], intra=Link(bytes_per_second, 1e-5), meeting_seconds=[meeting] * 2)
    slow = partial(replace, step_seconds=0.02, op_seconds=2e-5)
    return replace(found, devices=tuple(map(slow, found.devices)))


def planned() -> PlannedProgram:
    captured = convolutions(6)
    return captured.at(captured.costs(6, memory=False))


def program(*regions: OpRegion, zero: int = 1) -> Plan:
    return Plan((Pipeline((Stage((0, 1), (2, 1), program=regions),)),), zero=zero)


ROWS = OpRegion("*", "rows")
LAST = (OpRegion(":mul", "whole"), OpRegion(":div", "whole"))


def terms(prediction: Prediction) -> dict[str, float]:
    return dict(prediction.devices[-1].seconds)


@pytest.mark.parametrize("zero", [0, 1])
def test_rows_by_a_program_take_what_rows_take(zero: int) -> None:
    asked, given = planned(), cluster()
    by_program = asked.expect(program(*LAST, ROWS, zero=zero), given).seconds
    alone = simulated_seconds(replace(Plan.data_parallel((0, 1), (2, 1)), zero=zero), asked.costs, given)
    assert by_program == pytest.approx(alone, rel=0.1)


def test_each_exchange_of_activations_is_a_meeting_and_gradients_share_buckets() -> None:
    asked = planned()
    plan = program(OpRegion("head*", "head.0.weight:0"), ROWS)
    with_meetings, without = (asked.expect(plan, cluster(meeting=lost)) for lost in (MEETING, 0.0))
    difference = {term: seconds - terms(without)[term] for term, seconds in terms(with_meetings).items()}
    exchanges = difference["tensor_parallel"] / MEETING
    assert exchanges == pytest.approx(round(exchanges)) != 0
    assert asked.costs.whole.parameter_bytes < BUCKET_BYTES
    assert difference["gradient_sync"] == pytest.approx(MEETING)


def test_parameters_that_every_device_keeps_are_not_gathered_but_all_updated() -> None:
    asked, plan = planned(), program(OpRegion("*", "whole"))
    spread, kept = (terms(asked.expect(replace(plan, zero=zero), cluster())) for zero in (1, 0))
    assert spread["gather"] > kept["gather"] == 0.0
    assert kept["optimizer"] == pytest.approx(3 * spread["optimizer"])
    assert kept["gradient_sync"] == spread["gradient_sync"] == 0.0


def test_a_simulation_of_a_program_is_what_it_is_expected_to_take_with_every_job_in_it() -> None:
    asked, given = planned(), cluster()
    plan = program(OpRegion("head*", "head.0.weight:0"), ROWS)
    step = asked.simulate(plan, given)
    assert step.seconds == pytest.approx(asked.expect(plan, given).seconds)
    kinds = {event.kind for event in step.timeline.events}
    assert kinds == {"host", "gather", "forward", "communication", "backward", "gradients", "optimizer"}
    assert 0 < step.bubbles[0] < 1
    assert all(step.peak_bytes.values())


def test_costs_alone_do_not_simulate_a_program() -> None:
    asked = planned()
    with pytest.raises(PlanError, match="op by op, for which the model is needed"):
        simulated_seconds(program(ROWS), asked.costs, cluster())
