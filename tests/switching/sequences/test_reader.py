"""Plans are made ahead in a thread, once for each batch, and are those that would be made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event, current_thread, main_thread

import pytest

from hetu_fx.errors import BatchError
from hetu_fx.planner.dispatch.assignment import Assignment, EligibleVariant, Request
from hetu_fx.planner.dispatch.policies import Hydraulis
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.sequences.reader import SequencePlanner

CANDIDATES = (EligibleVariant("one", Plan.single(), (Scheme(1, 1, TimeFit(0.0, 1.0), 64),)),)


@dataclass(frozen=True)
class Watched(Hydraulis):
    """Tells where it plans."""

    in_thread: Event = field(default_factory=Event)
    in_main: Event = field(default_factory=Event)

    def __call__(self, candidates: Sequence[EligibleVariant], request: Request, /) -> tuple[Assignment, ...]:
        (self.in_main if current_thread() is main_thread() else self.in_thread).set()
        return Hydraulis.__call__(self, candidates, request)


def test_a_plan_made_ahead_is_the_one_made_on_the_spot() -> None:
    planner, other = SequencePlanner(), SequencePlanner()
    watched = Watched()
    planner.ahead((watched, CANDIDATES, Request((5, 9, 30))))
    found = planner.take((watched, CANDIDATES, Request((5, 9, 30))))
    assert watched.in_thread.is_set()
    assert not watched.in_main.is_set()
    assert found.assignments == other.take((Hydraulis(), CANDIDATES, Request((5, 9, 30)))).assignments
    assert planner.stats.batches == other.stats.batches == 1


def test_a_batch_nobody_told_of_is_planned_on_the_spot() -> None:
    planner = SequencePlanner()
    watched = Watched()
    planner.ahead((watched, CANDIDATES, Request((5, 9, 30))))
    planner.take((watched, CANDIDATES, Request((5, 9))))
    assert watched.in_main.is_set()
    assert planner.stats.waited_seconds >= planner.stats.seconds > 0
    assert planner.stats.hidden_share == 0.0


def test_an_error_of_a_plan_made_ahead_is_raised_by_its_step() -> None:
    planner = SequencePlanner()
    planner.ahead((Hydraulis(), CANDIDATES, Request((65,))))
    with pytest.raises(BatchError, match="no variant takes"):
        planner.take((Hydraulis(), CANDIDATES, Request((65,))))
