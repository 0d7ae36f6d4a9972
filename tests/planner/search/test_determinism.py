"""The same question has the same answer in every process: nothing depends on the order of sets or on addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetu_fx.planner.make_plan import make_plans, question_key
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import SEARCHES
from hetu_fx.planner.values.profile_file import Profile
from tests.planner.search.hydraulis.test_adapter import PROBLEM
from tests.planner.search.malleus.test_adapter import MODEL, eight
from tests.planner.search.nets import UNEQUAL, problem
from tests.planner.test_searches import COSTS, paper
from tests.planner.test_searches import TIGHT as TIGHT_BYTES

ROOT = Path(__file__).parents[3]
SLOWED = Problem(MODEL, eight({0: 2.6, 5: 1.4}).without([2, 3, 6, 7]))
TIGHT = Problem(Profile(COSTS), paper(*[100] * 4, memory_bytes=TIGHT_BYTES))
RAGGED = Problem(MODEL, eight({}).without([7]))


@pytest.mark.timeout(900)
def test_every_search_answers_the_same_whatever_the_hashes_are() -> None:
    here = answers()
    assert here.count("pipelines") >= 7
    assert _answers_elsewhere() == here


def answers() -> str:
    """Ask every search; print what this process, whose hashes are its own, is told."""
    problems = {"hydraulis": PROBLEM, "hap": problem(UNEQUAL), "ragged": RAGGED, "sharded": TIGHT}
    return "\n".join(f"{name} {_answer(name, problems.get(name, SLOWED))}" for name in SEARCHES)


def _answer(name: str, asked: Problem) -> str:
    plans = [plan.to_json() for plan in make_plans(asked, name)]
    return f"{question_key(asked, name)} {json.dumps(plans)}"


def _answers_elsewhere() -> str:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    ask = f"from {__name__} import answers; print(answers(), end='')"
    command = [sys.executable, "-c", ask]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=800).stdout
