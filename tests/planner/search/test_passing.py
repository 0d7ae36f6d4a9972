from __future__ import annotations

import itertools
import random

import pytest

from hetu_fx.planner.price.pipeline import finish
from hetu_fx.planner.price.stage import StageCosts
from hetu_fx.planner.search.passing import Passing, backwards, charged
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Schedule, Stage


def played(work: list[Line], edges: list[Line], rows: int, count: int, schedule: Schedule) -> float:
    """Return the seconds of a schedule that is played, of stages that hand over beside their work."""
    nothing, around = Line(), [*edges, Line()]
    stages = [
        StageCosts(
            Stage((0,)), (PartCosts(),), (), (0.0,), (own,), nothing, nothing, there, back, (nothing,), (nothing,)
        )
        for own, there, back in zip(work, around, [Line(), *edges], strict=True)
    ]
    return finish(stages, rows, count, schedule, beside=(1,) * len(edges)).seconds


def drawn(seed: int) -> tuple[list[Line], list[Line], int]:
    """Draw stages of like work, what they hand over, and how many micro-batches there are: not fewer than stages."""
    rng = random.Random(seed)
    work = [Line(0.0, 3.0 * rng.uniform(0.8, 1.0)) for _ in range(rng.randint(1, 12))]
    edges = [Line(0.0, rng.choice((0.01, 0.5, 1.0)) * rng.uniform(0.5, 1.0)) for _ in work[1:]]
    return work, edges, rng.randint(len(work), 64)


def test_micro_batches_take_about_as_long_as_in_a_schedule_that_is_played() -> None:
    for seed in range(200):
        work, edges, count = drawn(seed)
        found = Passing.of(work, edges, "1f1b").seconds(count, count)
        assert found == pytest.approx(played(work, edges, count, count, "1f1b"), rel=0.07)


def test_hand_overs_slow_pipelines_that_take_turns_alone() -> None:
    work, edges = [Line(0.0, 3.0)] * 8, [Line(0.0, 2.0)] * 7
    whole = 8 * 3.0 + 2 * 7 * 2.0
    assert Passing.of(work, edges, "1f1b").seconds(64, 64) == pytest.approx(whole + 63 * whole / 8)
    assert Passing.of(work, edges, "1f1b").seconds(4, 4) == pytest.approx(whole + 3 * (9.0 + 8.0) / 3)
    assert Passing.of(work, edges, "gpipe").seconds(64, 64) == pytest.approx(whole + 63 * 3.0)


def test_lines_that_are_nowhere_above_others_change_nothing() -> None:
    for seed in range(100):
        work, edges, count = drawn(seed)
        made, stages = Passing.of(work, edges, "1f1b"), len(work)
        own, sent = ([line.slope for line in lines] for lines in (work, edges))
        turns = [sum(own[s:]) + 2 * sum(sent[s:]) for s in range(stages)]
        beats = [turn / (stages - s) for s, turn in enumerate(turns) if stages - s < count]
        pairs = [(a + b + 2 * c) / 2 for (a, b), c in zip(itertools.pairwise(own), sent, strict=True)]
        beat = max([*own, *beats, *(pairs if count > 2 else [])])
        assert made.seconds(count, count) == pytest.approx(turns[0] + (count - 1) * beat)


def test_nothing_takes_no_time() -> None:
    assert Passing.of([Line(1.0, 1.0)], [], "1f1b").seconds(0, 4) == 0.0


def test_what_is_handed_over_is_charged_to_both_ends_and_counts_in_the_last_backward() -> None:
    work, edges = [Line(0.0, 3.0), Line(0.0, 6.0)], [Line(0.0, 0.5)]
    assert [line(1) for line in charged(work, edges)] == [3.5, 6.5]
    found = [line(1) for line in backwards(work, edges)]
    assert found == pytest.approx(list(itertools.accumulate([2.0, 0.5 + 4.0])))
