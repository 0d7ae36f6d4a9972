"""The mutation check's mistakes still fit the code they are made in."""

import ast
import subprocess
import sys

import pytest

from benchmarks.mutants.mutant import ROOT, VARIABLE, read_mutants
from benchmarks.mutations import FAST, FEWEST, GUARDS, ON_PROCESSES

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_a_mutant_is_a_file_with_one_mistake(mutant):
    ast.parse(mutant.apply((ROOT / mutant.path).read_text()))


def test_there_are_enough_and_their_tests_exist():
    assert len(MUTANTS) >= FEWEST
    assert {mutant.on_processes for mutant in MUTANTS.values()} == {False, True}
    assert all((ROOT / path.partition("::")[0]).exists() for path in (*FAST, *GUARDS, *ON_PROCESSES))


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
