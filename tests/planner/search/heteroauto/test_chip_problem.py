from collections.abc import Callable
from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer
from tests.planner.search.heteroauto.examples import kind, layers_of, problem

FOUR = kind("four", (4, 3), layers_of(1.0))


def test_groups_stay_inside_a_node() -> None:
    assert [FOUR.num_groups(degree) for degree in (1, 2, 4)] == [7, 3, 1]
    assert FOUR.chips == 7
    assert replace(FOUR, nodes=(2, 2, 2)).degrees == (1, 2)


def test_replicas_are_all_that_divide_the_micro_batches_if_none_are_given() -> None:
    assert problem(FOUR, micro_batches=12).replicas == (1, 2, 3, 4, 6)
    assert replace(problem(FOUR, micro_batches=12), replicas=(4, 1, 4)).replicas == (1, 4)


def test_equal_problems_are_equal_values() -> None:
    assert hash(problem(FOUR)) == hash(problem(kind("four", (4, 3), layers_of(1.0))))
    assert problem(FOUR) == problem(kind("four", (4, 3), dict(reversed(layers_of(1.0).items()))))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Layer(0.0, 1.0), "layer has forward_seconds 0.0\nhint: give a finite number above 0"),
        (lambda: Layer(1.0, 1.0, kept_bytes=-1.0), "layer has kept_bytes -1.0\nhint: give a finite number, 0 or more"),
        (lambda: EndCosts(work=-1.0), "edge has work -1.0"),
        (lambda: replace(FOUR, nodes=()), "kind 'four' has least of nodes 0"),
        (lambda: replace(FOUR, layers={3: Layer(1.0, 1.0)}), r"layers for groups of \[3\]\nhint: give powers of two"),
        (lambda: replace(FOUR, recomputed_share=-0.1), "recomputed_share -0.1"),
        (lambda: problem(FOUR, FOUR), r"kinds are named \['four', 'four'\]\nhint: give one at least, each with a name"),
        (lambda: problem(FOUR, layers=0), "problem has num_layers 0"),
        (lambda: replace(problem(FOUR), replicas=(3, 4)), r"8 micro-batches for \[3\] replicas\nhint: give numbers"),
        (lambda: replace(problem(FOUR), bubble=2.0), r"bubble is 2.0\nhint: give 1 \(1F1B\) to 0"),
        (lambda: replace(problem(FOUR), zero=2), "zero 2\nhint: give one of"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_give(
    wrong: Callable[[], ChipKind | Layer | EndCosts | HeteroProblem], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        wrong()
