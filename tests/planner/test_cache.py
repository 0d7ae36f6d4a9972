import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner import cache
from hetu_fx.planner.cache import default_folder, make_or_find_plans, question_key
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import DEFAULT
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer
from tests.planner.search.nets import problem

PROBLEM = Problem(Profile(transformer()), paper(4, 2))


def explained(plans: tuple[Plan, ...]) -> list[str]:
    return [plan.explain() for plan in plans]


def test_the_same_question_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_or_find_plans(PROBLEM, DEFAULT, tmp_path / "new")
    monkeypatch.setattr(cache, "make_plans", lambda *question: pytest.fail("searched again"))
    again = replace(PROBLEM, cluster=Cluster.from_json(PROBLEM.cluster.to_json()), tell=print)
    assert explained(make_or_find_plans(again, DEFAULT, tmp_path / "new")) == explained(first)


def test_the_key_depends_on_all_that_the_answer_depends_on() -> None:
    others = [
        replace(PROBLEM, profile=PROBLEM.profile.with_rows(17)),
        replace(PROBLEM, cluster=paper(4, 3)),
        replace(PROBLEM, options=PlanOptions(zero=0)),
        replace(PROBLEM, before=Plan.single()),
        replace(PROBLEM, captured=problem(PROBLEM.cluster).captured),
    ]
    keys = {question_key(problem, DEFAULT) for problem in (PROBLEM, *others)} | {question_key(PROBLEM, "malleus")}
    assert len(keys) == len(others) + 2
    assert question_key(replace(PROBLEM, tell=print), DEFAULT) in keys


@pytest.mark.parametrize("spoil", ["", "{}", "other key", "no plans"])
def test_a_file_that_is_not_the_answer_is_made_anew(tmp_path: Path, spoil: str) -> None:
    first = make_or_find_plans(PROBLEM, DEFAULT, tmp_path)
    path = tmp_path / f"{question_key(PROBLEM, DEFAULT)}.json"
    good = json.loads(path.read_text())
    bad = {"other key": good | {"key": "0"}, "no plans": good | {"plans": []}}
    path.write_text(json.dumps(bad[spoil]) if spoil in bad else spoil)
    told: list[str] = []
    assert explained(make_or_find_plans(replace(PROBLEM, tell=told.append), DEFAULT, tmp_path)) == explained(first)
    assert told[0].startswith("planning anew: ")
    assert json.loads(path.read_text()) == good


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    plans = make_or_find_plans(replace(PROBLEM, tell=told.append), DEFAULT, tmp_path / "file" / "inside")
    assert len(plans) == 1
    assert told[-1].startswith("the plan is not kept for the next time: ")


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == Path("/somewhere/hetu_fx/plans")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/hetu_fx/plans")
