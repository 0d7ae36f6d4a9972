"""The same question has the same answer in every process: nothing depends on the order of sets or on addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ASK_ALL = """
import json
from tests.planner.search.hydraulis.test_adapter import PROBLEM as equal
from tests.planner.search.nets import UNEQUAL, problem as net
from tests.planner.search.malleus.test_adapter import MODEL, eight
from hetu_fx.planner.make_plan import question_key
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import SEARCHES

slowed = Problem(MODEL, eight({0: 2.6, 5: 1.4}).without([2, 3, 6, 7]))
for name in SEARCHES:
    problem = {"hydraulis": equal, "hap": net(UNEQUAL)}.get(name, slowed)
    print(name, question_key(problem, name), json.dumps([plan.to_json() for plan in make_plans(problem, name)]))
"""


@pytest.mark.timeout(900)
def test_every_search_answers_the_same_whatever_the_hashes_are() -> None:
    answers = [_answer(seed) for seed in ("1", "2")]
    assert answers[0] == answers[1]
    assert answers[0].count("pipelines") >= 7


def _answer(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASK_ALL]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=800).stdout
