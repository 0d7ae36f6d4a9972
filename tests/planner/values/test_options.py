"""What users allow and forbid: names that are known, each meaning what its plans do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.values.options import FEATURES, Choice, PlanOptions, TimeLimit
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage

PLANS = {
    "data_parallel": Plan.data_parallel([0, 1]),
    "tensor_parallel": Plan.tensor_parallel([0, 1]),
    "pipeline": Plan((Pipeline((Stage((0,)), Stage((1,)))),)),
    "context": Plan.context_parallel([0, 1]),
    "sequence_parallel": replace(Plan.single(), sequence_parallel=True),
    "experts": replace(Plan.tensor_parallel([0, 1]), split=(("*.experts.*", 0),)),
    "program": Plan((Pipeline((Stage((0, 1), program=(OpRegion("*", "whole"),)),)),)),
    "recompute": Plan((Pipeline((Stage((0,), blocks=2, recompute=1),)),)),
    "zero": Plan.single(),
    "whole_states": replace(Plan.data_parallel([0, 1]), zero=0),
    "whole_gradients": Plan.single(),
    "zero_2": Plan.data_parallel([0, 1], zero=2),
    "zero_3": Plan.data_parallel([0, 1], zero=3),
    "zero_bubble": replace(Plan.single(), schedule="zero-bubble"),
    "interleaved": Plan((Pipeline((Stage((0,)), Stage((1,)))),), schedule="interleaved"),
    "bfloat16": Plan((Pipeline((Stage((0,), dtype="bfloat16"),)),)),
    "uneven": Plan.tensor_parallel([0, 1], [2, 1]),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_refused_where_it_is_forbidden_and_not_where_it_is_allowed(name: str) -> None:
    assert name in PlanOptions().chosen(Choice.of(forbid=name)).refused(PLANS[name])
    assert name not in PlanOptions().chosen(Choice.of(allow=name)).refused(PLANS[name])


@pytest.mark.parametrize("name", FEATURES)
def test_a_plan_without_a_feature_is_not_refused_for_it(name: str) -> None:
    plain = replace(Plan.single(), zero=0)
    assert not PlanOptions().chosen(Choice.of(forbid=name)).refused(plain)


@pytest.mark.parametrize(
    ("plan", "uneven"),
    [
        (Plan.data_parallel([0, 1], [3, 1]), True),
        (Plan((Pipeline((Stage((0,), blocks=3), Stage((1,), blocks=2))),)), False),
        (Plan((Pipeline((Stage((0,), blocks=4), Stage((1,), blocks=2))),)), True),
        (Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))), True),
        (Plan.data_parallel([0, 1]), False),
    ],
)
def test_uneven_is_what_equal_devices_would_not_do(plan: Plan, uneven: bool) -> None:
    assert ("uneven" in PlanOptions().chosen(Choice.of(forbid="uneven")).refused(plan)) is uneven


def test_zero_is_what_plans_must_have() -> None:
    spread = Plan.data_parallel([0, 1])
    whole = replace(spread, zero=0)
    assert [*PlanOptions().allowed([spread, whole])] == [spread, whole]
    assert [*PlanOptions().chosen(Choice.of(zero=1)).allowed([spread, whole])] == [spread]
    assert [*PlanOptions().chosen(Choice.of(zero=0)).allowed([spread, whole])] == [whole]
    plans = [replace(spread, zero=zero) for zero in range(4)]
    for zero, plan in enumerate(plans):
        assert [*PlanOptions().chosen(Choice.of(zero=zero)).allowed(plans)] == [plan]


def test_what_is_allowed_is_forbidden_no_longer() -> None:
    strict = PlanOptions().chosen(Choice.of(forbid=["uneven", "tensor_parallel"]))
    assert set(strict.off) - set(PlanOptions().off) == {"tensor_parallel", "uneven"}
    assert strict.chosen(Choice.of(allow=["uneven", "tensor_parallel"])) == PlanOptions()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"forbid": "tensor_paralel"}, "no feature .tensor_paralel. to allow or forbid .did you mean"),
        ({"forbid": "zero", "allow": "zero"}, "both allowed and forbidden"),
        ({"forbid": "zero", "zero": 1}, "zero is 1, but zero is forbidden"),
        ({"allow": "zero", "zero": 0}, "zero is 0, but zero is allowed"),
        ({"zero": 4}, "zero is 4"),
        ({"seconds": 0}, "search has seconds 0"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanOptions().chosen(Choice.of(**choice))  # type: ignore[arg-type]


def test_a_program_in_which_rows_meet_is_not_cut_whatever_is_allowed() -> None:
    with pytest.raises(PlanError, match="rows meet in the model"):
        PlanOptions.of_program(mixes_rows=True, choice=Choice.of(allow="pipeline"))


class Clock:
    """A clock."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_a_search_goes_on_until_its_time_is_over_and_it_has_found_something() -> None:
    clock = Clock()
    limit = TimeLimit(10.0, clock)
    assert not limit.ends({1: 2})
    clock.now = 15.0
    assert not limit.ends({})
    assert not limit.cut
    assert limit.ends({1: 2})
    assert limit.cut


def test_without_seconds_it_is_never_over() -> None:
    clock = Clock()
    limit = TimeLimit(clock=clock)
    clock.now = 1e12
    assert not limit.ends(True)
