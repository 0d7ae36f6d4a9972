"""The mutation check's mistakes still fit the code they are made in."""

import ast
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from benchmarks.kit.forks import in_forks
from benchmarks.mutants.__main__ import FAST, FEWEST, GUARDS, ON_PROCESSES
from benchmarks.mutants.live import break_functions
from benchmarks.mutants.mutant import ROOT, VARIABLE, Mutant, read_mutants
from hetu_fx.graph.tracing.contents import frozen

MUTANTS = read_mutants()
FORGETS_SETS = "guards forget what sets hold"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_is_a_file_with_one_mistake(mutant):
    ast.parse(mutant.apply((ROOT / mutant.path).read_text()))


def test_there_are_enough_and_their_tests_exist():
    assert len(MUTANTS) >= FEWEST
    assert {mutant.on_processes for mutant in MUTANTS.values()} == {False, True}
    named = [test for mutant in MUTANTS.values() for test in mutant.tests]
    assert all((ROOT / path.partition("::")[0]).exists() for path in (*FAST, *GUARDS, *ON_PROCESSES, *named))


def test_a_process_imports_the_mutant_that_its_environment_names(tmp_path):
    code = (
        "from benchmarks.mutants.mutant import install; install()\n"
        "from hetu_fx.comm_ops.plans.routes import Route, RouteKind\n"
        "print(Route(RouteKind.SUM, ((0,), (1, 2))).columns())"
    )
    for name, expected in ((None, "[(0, 1), (0, 2)]"), ("leaves copies out of the sum", "[(0, 1)]")):
        environment = {"PYTHONPATH": str(ROOT), **({VARIABLE: name} if name else {})}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def freezes(mutant: str, tell: Any) -> None:
    changed = break_functions(read_mutants()[mutant])
    given = {1}
    tell((changed, frozen(given) is given))


def test_a_fork_has_the_mistake_and_this_process_has_not() -> None:
    (found,) = in_forks([FORGETS_SETS], freezes, 1, 60.0)
    assert found == (FORGETS_SETS, [(1, True)])
    given = {1}
    assert frozen(given) is not given


def test_a_mistake_outside_of_functions_is_refused() -> None:
    mutant = Mutant(
        "a constant", "hetu_fx/graph/tracing/contents.py", '_RANDOM = ("random", ', '_RANDOM = ("other", ', False
    )
    with pytest.raises(ValueError, match="changes no function"):
        break_functions(mutant)


def test_what_a_job_said_before_its_bound_or_its_death_is_heard() -> None:
    def work(job: str, tell: Any) -> None:
        tell(job)
        time.sleep(60) if job == "slow" else os._exit(1)

    assert dict(in_forks(["slow", "dies"], work, 2, 1.0)) == {"slow": ["slow"], "dies": ["dies"]}


def test_an_error_of_a_job_is_raised() -> None:
    def work(job: str, tell: Any) -> None:
        raise ValueError(job)

    with pytest.raises(ValueError, match="wrong"):
        list(in_forks(["wrong"], work, 1, 60.0))
