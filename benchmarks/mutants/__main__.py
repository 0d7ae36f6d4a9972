"""The mutation check: break what resolves, plans, moves and guards in small ways, and see whether the tests notice.

Every mutant is a process of its own that runs the fast tests, or those on real processes where only they can see it,
until the first failure. A mutant that survives means that a test is missing. With `--scripts`, what scripts do to a
model (`python -m tests.scripts`) must notice each mistake in the guards, all of them within four minutes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import perf_counter

import hypothesis  # noqa: F401  (imported once for all forks, as are torch and numpy)
import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

from benchmarks.kit.report import Bar, Row, finish, parser
from benchmarks.kit.smallest import few
from benchmarks.mutants.mutant import ROOT, VARIABLE, Mutant, install, read_mutants

SECONDS = 300
QUICK = 6  # every so many mutants in a quick run
FEWEST = 20

# Quickest first, as the first failure ends a run.
_FIRST = (
    "resolve/test_intermediates",
    "resolve/test_edge",
    "plans/test_routes",
    "plans/test_bsr_plan",
    "plans/test_bsr_senders",
    "resolve/test_resolve",
)
_LAST = ("resolve/test_properties", "resolve/test_explain", "plans/test_cost", "ops/test_table")
FAST = (
    *(f"tests/comm_ops/{name}.py" for name in _FIRST),
    "tests/oracles",
    "tests/annotations",
    *(f"tests/comm_ops/{name}.py" for name in _LAST),
)
_GUARDS = ("hetu_fx/program/", "hetu_fx/graph/tracing/contents.py", "switching/")
_OF_GUARDS = ("reads", "code_reads", "surroundings", "not_kept", "structure", "watched", "hooks")
GUARDS = (
    *(f"tests/program/test_{name}.py" for name in _OF_GUARDS),
    "tests/graph/tracing/test_contents.py",
    "tests/switching/test_members.py",
)
SCRIPTS_SECONDS = 240
ON_PROCESSES = ("tests/comm_ops/test_distributed.py::test_values_and_gradients_of_many_changes_on_four_ranks",)


def main() -> int:
    """Run the tests without a mistake, which must pass, then with each."""
    made = parser("mutants", "Breaks what resolves, moves and guards in small ways; tests must see it.")
    made.add_argument("--scripts", action="store_true", help="mistakes in guards, noticed by tests.scripts")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these mutants only")
    options = made.parse_args()
    chosen = [mutant for name, mutant in read_mutants().items() if not options.only or name in options.only]
    wanted = [mutant for mutant in chosen if (bool(mutant.scripts) if options.scripts else not mutant.only_scripts)]
    wanted = few(wanted[:: QUICK if options.quick else 1])
    for mutant in wanted:  # all fit the code, before the first costs time
        mutant.apply((ROOT / mutant.path).read_text())
    return by_scripts(wanted) if options.scripts else by_tests(wanted, 0 if options.quick or options.only else FEWEST)


def by_scripts(mutants: Sequence[Mutant]) -> int:
    """Judge mistakes in guards by what scripts do."""
    from benchmarks.mutants.by_scripts import judge_all  # seconds, for what scripts import

    start, before = perf_counter(), _processor_seconds()
    rows = judge_all(mutants)
    took = (_processor_seconds() - before) / len(os.sched_getaffinity(0))  # what else runs here does not count
    bars = [_share(rows), Bar("processor seconds of each core", took, SCRIPTS_SECONDS, at_least=False)]
    return finish("mutants", bars, rows, seconds=perf_counter() - start)


def _processor_seconds() -> float:
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def by_tests(mutants: Sequence[Mutant], fewest: int) -> int:
    """Judge mistakes by the tests, which must pass without any."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for tests in {_tests(mutant) for mutant in mutants}:
            status, output, _ = run_tests(None, tests, copy)
            if status != 0:
                print(f"the tests fail without any mistake (status {status}):\n{output}")
                return 2
        rows = [judge(mutant, copy) for mutant in mutants]
    return finish("mutants", [_share(rows), Bar("mutants", len(rows), fewest, at_least=True)], rows)


def _share(rows: Sequence[Row]) -> Bar:
    caught = sum(row["caught"] == "yes" for row in rows)
    return Bar("share of mutants caught", caught / len(rows), 1.0, at_least=True)


def copied(folder: Path) -> Path:
    """Copy the sources, so that edits meanwhile change nothing, and let every Python started there take its mistake."""
    copy = folder / "copy"
    hidden = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=hidden)
    (copy / "sitecustomize.py").write_text("from benchmarks.mutants.mutant import install\ninstall()\n")
    return copy


def judge(mutant: Mutant, folder: Path) -> Row:
    """Run the tests on one mutant: caught means that tests ran and failed, or never ended."""
    status, output, seconds = run_tests(mutant, _tests(mutant), folder)
    found = [line for line in output.splitlines() if line.startswith("FAILED ")]
    by = "time-out" if status is None else found[0].split(" ")[1].rpartition("/")[2] if found else f"status {status}"
    caught = "yes" if status is None or (status == 1 and found) else "NO"
    print(f"{mutant.name}: {caught} ({by}, {seconds:.0f} s)", file=sys.stderr, flush=True)
    return {"mutant": mutant.name, "file": mutant.path, "caught": caught, "by": by}


def run_tests(mutant: Mutant | None, tests: Sequence[str], folder: Path) -> tuple[int | None, str, float]:
    """Give pytest's exit status (None: it ran out of time), its last lines, and the seconds it took.

    The process is forked from this one, which has imported all that is not broken.
    """
    start, output = perf_counter(), folder / "output.txt"
    process = get_context("fork").Process(target=_run_pytest, args=(mutant, tests, folder, output))
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    process.kill()
    process.join()
    return status, output.read_text()[-3000:], perf_counter() - start


def _run_pytest(mutant: Mutant | None, tests: Sequence[str], folder: Path, output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **({VARIABLE: mutant.name} if mutant else {})}
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / ".hypothesis")
    install(folder)
    status = pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests])
    sys.stdout.flush()
    os._exit(status)


def _tests(mutant: Mutant) -> tuple[str, ...]:
    if mutant.tests:
        return mutant.tests
    tests = GUARDS if mutant.path.startswith(_GUARDS) else ON_PROCESSES if mutant.on_processes else FAST
    return tuple(few(tests))


if __name__ == "__main__":
    raise SystemExit(main())
