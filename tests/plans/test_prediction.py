"""What a plan is expected to cost, in words."""

from __future__ import annotations

from hetu_fx.plans.prediction import DeviceCost, Prediction

TERMS = ("compute", "tensor_parallel", "idle")


def cost(rank: int, *seconds: float) -> DeviceCost:
    return DeviceCost(rank, tuple(zip(TERMS, seconds, strict=True)), ())


def test_devices_that_take_the_same_stand_in_one_row_without_terms_that_nobody_has() -> None:
    made = Prediction(0.25, (cost(0, 0.2, 0.0, 0.05), cost(1, 0.2, 0.0, 0.05), cost(2, 0.25, 0.0, 0.0)))
    assert str(made).splitlines() == [
        "predicted step: 250 ms",
        "device  compute  idle",
        "0, 1    200 ms   50 ms",
        "2       250 ms   0",
    ]
    assert made.text([1]).splitlines()[1:] == ["busiest  compute  idle", "1        200 ms   50 ms"]


def test_one_figure_stands_for_the_step_and_what_the_terms_add_up_to_only_where_that_differs() -> None:
    told = [str(Prediction(1.0, formula_seconds=formula)) for formula in (None, 1.01, 1.5, 0.5)]
    assert told[:2] == ["predicted step: 1 s"] * 2
    assert told[2] == "predicted step: 1 s (terms add up to 1.5 s; overlap hides the rest)"
    assert told[3] == "predicted step: 1 s (terms add up to 500 ms; the rest is waiting)"


def test_a_plan_of_a_search_whose_time_was_over_says_how_far_it_may_be_from_the_best() -> None:
    told = str(Prediction(2.0, bound_seconds=1.5))
    assert "best so far" in told
    assert "no plan takes less than 1.5 s, 25 % less than this one" in told
