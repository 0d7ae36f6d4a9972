import math
from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.staying import moving_seconds, with_moves
from hetu_fx.planner.searches import SEARCHES
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import transformer

COSTS = transformer(layers=4, rows=16, length=128, width=256)
RUNNING = Plan((Pipeline((Stage((0,), blocks=2), Stage((1,), blocks=2)), micro_batches=4),))
OTHER = Plan((Pipeline((Stage((0,), blocks=1), Stage((1,), blocks=3)), micro_batches=4),))
SLOWED = Cluster.on_paper([1e12] * 2, intra=Link(1e8)).with_rates({0: 3.0})


def asked(steps_ahead: float, cluster: Cluster = SLOWED) -> Problem:
    return Problem(Profile(COSTS), cluster, PlanOptions(), before=RUNNING, steps_ahead=steps_ahead)


def break_even() -> float:
    """Return the steps after which the move to OTHER has paid for itself."""
    stay, go = (expect(plan, COSTS, SLOWED).seconds for plan in (RUNNING, OTHER))
    assert go < stay
    return moving_seconds(RUNNING, OTHER, COSTS, SLOWED) / (stay - go)


@pytest.mark.parametrize(("share", "goes"), [(0.01, False), (0.999, False), (1.001, True), (100.0, True)])
def test_a_job_moves_when_there_are_more_steps_ahead_than_pay_for_the_move(share: float, goes: bool) -> None:
    seconds = expect(OTHER, COSTS, SLOWED).seconds
    priced = with_moves({OTHER: seconds}, asked(share * break_even()), RUNNING)
    assert min(priced, key=lambda plan: priced[plan]) == (OTHER if goes else RUNNING)
    assert priced[OTHER] >= seconds


def test_a_plan_whose_steps_alone_take_longer_is_not_asked_what_getting_there_takes() -> None:
    stay = expect(RUNNING, COSTS, SLOWED).seconds
    assert with_moves({OTHER: 2 * stay}, asked(1.0), RUNNING) == {RUNNING: stay, OTHER: 2 * stay}


@pytest.mark.parametrize("search", [name for name in SEARCHES if name not in ("hap", "hydraulis", "ragged", "sharded")])
def test_every_search_stays_with_few_steps_ahead_and_moves_with_many(search: str) -> None:
    (stays,), (goes,), (free,) = (make_plans(asked(steps), search) for steps in (1e-3, 1e9, math.inf))
    # micro-batches may change at once, as they move nothing
    assert [(s.devices, s.blocks) for *_, s in stays.stages] == [(s.devices, s.blocks) for *_, s in RUNNING.stages]
    assert stays.predicted is not None
    assert stays.predicted.seconds <= expect(RUNNING, COSTS, SLOWED).seconds
    assert goes.predicted is not None
    assert free.predicted is not None
    assert goes.predicted.seconds <= 1.001 * free.predicted.seconds < stays.predicted.seconds


@pytest.mark.parametrize("search", ["malleus", "auto"])
def test_a_job_in_chunks_stays_with_few_steps_ahead_as_whole_stages_hold_other_blocks(search: str) -> None:
    dealt = replace(RUNNING, schedule="interleaved", chunks=2)
    (stays,), (goes,) = (make_plans(replace(asked(steps), before=dealt), search) for steps in (1e-3, 1e9))
    assert (stays.schedule, stays.chunks, stays.devices) == ("interleaved", 2, (0, 1))
    assert stays.predicted is not None
    assert goes.predicted is not None
    assert goes.predicted.seconds < stays.predicted.seconds


def test_a_plan_that_no_longer_fits_is_left() -> None:
    small = Cluster.on_paper([1e12] * 2, memory_bytes=[int(3 * COSTS.whole.parameter_bytes)] * 2, intra=Link(1e8))
    alone = Plan((Pipeline((Stage((0,), blocks=4),), micro_batches=16),))
    (plan,) = make_plans(replace(asked(1e-3, small), before=alone))
    assert set(plan.devices) == {0, 1}


def test_steps_ahead_are_some() -> None:
    with pytest.raises(PlanError, match="steps_ahead is 0\nhint: give a number above 0"):
        asked(0)
