"""Where a step's seconds go: what is told apart adds up to the step."""

from __future__ import annotations

import pytest

from examples.demo.terms import PREDICTED, StepTerms, covered
from hetu_fx.planner.price.step import TERMS
from hetu_fx.plans.prediction import DeviceCost
from hetu_fx.show.timeline import Event

EVENTS = [
    Event(0, "step 1: forward", 0.0, 1.0, "forward"),
    Event(0, "step 1: backward", 1.0, 3.0, "backward"),
    Event(0, "step 1: optimizer", 3.0, 3.5, "optimizer"),
    Event(0, "step 1: sum", 0.5, 1.5, "communication"),
    Event(0, "step 1: sum", 0.75, 1.25, "communication"),
    Event(0, "step 1: gather", 3.25, 3.75, "communication"),
]


def test_measured_terms_add_up_to_the_step_and_messages_at_once_count_once() -> None:
    found = StepTerms.measured(EVENTS, 4.0)
    assert found.seconds == {"work": 2.0, "messages and waiting": 1.25, "update": 0.25, "besides": 0.5}
    assert found.step == pytest.approx(4.0)


def test_every_term_of_a_prediction_is_told_once() -> None:
    assert sorted(term for terms in PREDICTED.values() for term in terms) == sorted(TERMS)
    device = DeviceCost(0, tuple((term, 1.0) for term in TERMS), ())
    assert StepTerms.predicted(device).step == len(TERMS)


def test_only_what_lies_within_is_covered() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], 1.0, 6.0) == 3.0
    assert covered([], 0.0, 1.0) == 0.0
