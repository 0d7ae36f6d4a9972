from dataclasses import replace

import pytest

from benchmarks.cases.heteroauto import ablations, speed_up, superlinear
from hetu_fx.planner.search.heteroauto.chip_problem import HeteroProblem
from tests.planner.search.heteroauto.examples import kind, layers_of, problem

MIXED = superlinear()


def recomputing(given_problem: HeteroProblem) -> tuple[int, int]:
    """Return how many stages of the fast kind recompute together and alone."""
    found = speed_up(given_problem)
    alone = found.alone["fast"]
    assert alone is not None
    return sum(s.recompute for s in found.together.stages), sum(s.recompute for s in alone.stages)


def test_two_kinds_that_lack_nothing_are_worth_their_sum() -> None:
    alike = layers_of(1.0, {1: 1.0})
    two = problem(kind("one", (4,), alike), kind("other", (4,), alike), layers=8, micro_batches=16)
    assert speed_up(replace(two, bubble=0.0)).ratio == pytest.approx(1.0)
    assert speed_up(two).ratio == pytest.approx(0.8)  # deeper pipelines take longer to fill


def test_a_kind_that_holds_nothing_alone_adds_nothing_to_the_sum() -> None:
    tiny = kind("tiny", (2,), layers_of(1.0, kept_bytes=1.0), memory=0.2)
    found = speed_up(problem(tiny, kind("large", (2,), layers_of(1.0))))
    assert found.alone["tiny"] is None
    assert found.ratio >= 1.0


def test_fast_chips_of_little_memory_and_slow_ones_of_much_are_faster_together_than_the_sum_of_both() -> None:
    assert speed_up(MIXED).ratio > 1.05
    together, alone = recomputing(MIXED)
    assert together < alone


@pytest.mark.parametrize("cause", ["limits of memory", "the cost of recomputing"])
def test_without_its_cause_the_mixed_cluster_is_not_superlinear(cause: str) -> None:
    assert speed_up(ablations(MIXED)[cause]).ratio <= 1.0


def test_more_memory_makes_the_mixed_cluster_no_slower_but_less_superlinear() -> None:
    larger = replace(MIXED, kinds=tuple(replace(one, memory_bytes=1.2 * one.memory_bytes) for one in MIXED.kinds))
    less, more = speed_up(MIXED), speed_up(larger)
    assert more.together.seconds <= less.together.seconds
    assert more.ratio < less.ratio
