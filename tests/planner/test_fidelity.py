"""Closed form and simulation, held against each other on plans drawn at random."""

from __future__ import annotations

import pytest

from benchmarks.cases.fidelity import LIMIT, Fidelity, fidelity, share_over
from benchmarks.cases.regret import Question, regret


@pytest.fixture(scope="module")
def found() -> list[Fidelity]:
    return list(fidelity(200))


def test_the_closed_form_is_the_simulation_where_nothing_overlaps_or_shares(found: list[Fidelity]) -> None:
    plain = [one for one in found if one.is_plain]
    assert len(plain) > 40
    assert max(abs(one.difference) for one in plain) < 0.002


def test_overlap_and_sharing_explain_nearly_all_that_differs(found: list[Fidelity]) -> None:
    assert share_over([abs(one.difference) for one in found]) > 0.3
    assert share_over([one.unexplained for one in found], LIMIT) <= 0.06


def test_pipelines_that_are_alike_take_the_same_as_one(found: list[Fidelity]) -> None:
    assert max(one.folded for one in found) < 1e-6


def test_autos_choice_is_near_the_best_of_many_plans_by_simulation() -> None:
    assert regret(Question(8, ("A100-80G",), 10), 40)[0] < 1.02
