"""Long files start first and are run in shares, and the table of how long they take is of files that there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.costs import LEAST_SECONDS, LONG_SECONDS, ROOT, TABLE, CostRecorder, left_out, longest_first, read_costs

PARTS = ("not distributed and not gpu", "distributed and not gpu")
HERE, OTHER, GONE = "tests/test_costs.py", "tests/conftest.py", "tests/test_gone.py"


@pytest.mark.parametrize("markers", PARTS)
def test_the_table_is_of_files_that_there_are(markers: str) -> None:
    costs = read_costs(markers)
    assert costs
    assert [file for file in costs if not (ROOT / file).exists()] == []
    assert min(costs.values()) >= LEAST_SECONDS


def test_tests_of_long_files_come_first_and_others_stay_in_order() -> None:
    items: list[Any] = [SimpleNamespace(path=ROOT / file, number=n) for n, file in enumerate("abcbad")]
    longest_first(items, {"b": 2.0, "c": 3.0})
    assert [(item.path.name, item.number) for item in items] == [
        ("c", 2), ("b", 1), ("b", 3), ("a", 0), ("a", 4), ("d", 5),
    ]  # fmt: skip


@pytest.mark.parametrize("markers", PARTS)
def test_every_long_file_is_in_one_share_and_no_short_one_is_left_out(markers: str) -> None:
    costs, shares = read_costs(markers), 8
    gaps = [left_out(costs, shares, f"{commit:x}") for commit in range(shares)]
    long = {file for file, seconds in costs.items() if seconds >= LONG_SECONDS}
    assert set().union(*gaps) == long
    assert [sum(file not in gap for gap in gaps) for file in sorted(long)] == [1] * len(long)
    loads = [sum(costs[file] for file in long - gap) for gap in gaps]
    assert max(loads) - min(loads) <= max(costs[file] for file in long)


def test_one_share_is_all_files() -> None:
    assert left_out({HERE: 100.0, OTHER: 20.0}, 1, "abc") == frozenset()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "costs.toml"
    path.write_text(f'[plain]\n"{HERE}" = 5\n"{OTHER}" = 7\n"{GONE}" = 9\n[distributed]\n"{HERE}" = 3\n')
    return path


def test_a_run_writes_what_it_has_seen(table: Path) -> None:
    recorder = CostRecorder(PARTS[0], table)
    for seconds in (4.0, 4.4):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{HERE}::test_it", duration=seconds))  # type: ignore[arg-type]
    recorder.pytest_sessionfinish()
    assert list(read_costs(PARTS[0], table).items()) == [(HERE, 8), (OTHER, 7)]
    assert read_costs(PARTS[1], table) == {HERE: 3}


def test_short_files_are_left_out(table: Path) -> None:
    recorder = CostRecorder(PARTS[1], table)
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{OTHER}::test_it", duration=1.0))  # type: ignore[arg-type]
    recorder.pytest_sessionfinish()
    assert read_costs(PARTS[1], table) == {HERE: 3}
    assert read_costs(PARTS[0], table) == {HERE: 5, OTHER: 7}


def test_the_table_of_this_tree_is_sorted() -> None:
    for markers in PARTS:
        seconds = list(read_costs(markers, TABLE).values())
        assert seconds == sorted(seconds, reverse=True)
