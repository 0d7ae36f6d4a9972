"""The benchmarks' common end: bars, a table, one line of JSON; and that each of them runs. What they measure is not
tested here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.kit import smallest
from benchmarks.smoke import __main__ as smoke
from tests.costs import this_commit

ROOT = Path(__file__).parents[1]
KIT = ROOT / "benchmarks" / "kit"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return loaded("report")


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    return loaded("memory")


def loaded(name: str) -> ModuleType:
    """Load a file under a name of its own: the benchmarks are no part of what is installed."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", KIT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_bar_holds_from_its_own_side(report: ModuleType) -> None:
    assert report.Bar("throughput", 0.9, 0.9, at_least=True).holds
    assert not report.Bar("throughput", 0.89, 0.9, at_least=True).holds
    assert report.Bar("time", 1.03, 1.03, at_least=False).holds
    assert not report.Bar("time", 1.04, 1.03, at_least=False).holds


@pytest.mark.parametrize(("value", "status"), [(0.95, 0), (0.5, 1)])
def test_the_last_line_is_json_and_the_status_says_whether_bars_hold(
    report: ModuleType, capsys: pytest.CaptureFixture[str], value: float, status: int
) -> None:
    bar = report.Bar("share", value, 0.9, at_least=True)
    assert report.finish("demo", [bar], [{"who": "us", "seconds": 0.5}], speeds=(1.0,)) == status
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["benchmark"] == "demo"
    assert record["bars"] == [{"name": "share", "value": value, "bar": 0.9, "at_least": True, "holds": not status}]
    assert record["rows"] == [{"who": "us", "seconds": 0.5}]
    assert record["machine"]["speeds"] == [1.0]


def test_a_table_has_a_column_per_key(report: ModuleType) -> None:
    text = report.table([{"who": "DDP", "ms": 12.34567}, {"who": "hetu_fx", "ms": 3.0, "note": "ok"}])
    assert text.splitlines() == ["who         ms  note", "DDP      12.35", "hetu_fx      3    ok"]


def test_ratios_are_taken_within_a_round(report: ModuleType) -> None:
    assert report.median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_what_is_out_at_the_peak_of_a_step_adds_up(memory: ModuleType) -> None:
    kept, step = torch.ones(25), memory.STEP
    place = kept.untyped_storage().data_ptr()
    events = [
        (1, 1, 900),
        (2, 1, -900),
        (3, place, 100),
        (4, 2, 40),
        (11, 3, 30),
        (12, 3, -30),
        (13, 4, 20),
        (21, 5, 60),
    ]
    changes = [memory._Change(when, place, size) for when, place, size in [*events, (22, 5, -60), (30, 4, -20)]]
    marks = {step: (10, 40), "forward": (10, 19), "backward": (20, 29)}
    recorded = memory.Recorded(changes, marks)
    assert recorded.peak_bytes == 220
    found = recorded.at_peak({"kept": [kept]}, ("forward", "backward"))
    told = {what: size for what, size in found.items() if size}
    assert told == {"kept": 100, "other, from before": 40, "other, from forward": 20, "other, from backward": 60}
    assert sum(found.values()) == recorded.peak_bytes


def test_memory_that_another_thread_gives_back_is_told(memory: ModuleType) -> None:
    changes = [memory._Change(1, 1, 100), memory._Change(5, 1, 100)]  # handed out again: it was given back in between
    recorded = memory.Recorded(changes, {memory.STEP: (4, 6)})
    assert recorded.at_peak({}, ())["given back by other threads"] == 100


def test_a_record_of_torchs_allocator_is_read(memory: ModuleType) -> None:
    with memory.recording() as record:
        before = torch.ones(1000)
        with memory.measured_step():
            made = before * 2
            del made
    recorded = memory.Recorded.of(record)
    assert 8000 <= recorded.peak_bytes < 9000
    assert recorded.at_peak({"before": [before]}, ())["before"] == 4000


def test_the_smallest_case_has_few_of_all_and_judges_nothing(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(smallest.VARIABLE, "")
    monkeypatch.delenv(smallest.VARIABLE)
    assert (smallest.least(9, 2), smallest.few("abc"), smallest.compiler()) == (9, ["a", "b", "c"], "inductor")
    assert report.parser("demo", "").parse_args(["--smoke"]).quick
    assert (smallest.least(9, 2), smallest.few("abc"), smallest.compiler()) == (2, ["a"], "aot_eager")
    assert report.finish("demo", [report.Bar("share", 0.5, 0.9, at_least=True)], [{"who": "us"}]) == 0
    assert "MISSED" in capsys.readouterr().out


def test_shares_of_the_benchmarks_make_all_of_them() -> None:
    names = smoke.benchmarks()
    shares = [smoke.share_of(names, 8, f"{commit:x}") for commit in range(8)]
    assert sorted(name for share in shares for name in share) == names
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert int(this_commit(), 16) >= 0


def test_a_benchmark_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise AttributeError("captures has no capture")

    monkeypatch.setattr(import_module("benchmarks.ladder_malleus"), "main", broken)
    monkeypatch.setattr(import_module("benchmarks.ladder_hydraulis"), "main", lambda: 0)
    rows = {row["benchmark"]: row for row in smoke.rows_of(["ladder_malleus", "ladder_hydraulis"], 100.0)}
    assert [row["runs"] for row in rows.values()] == ["NO", "NO"]
    assert "captures has no capture" in str(rows["ladder_malleus"]["why"])
    assert "status 0" in str(rows["ladder_hydraulis"]["why"])  # but no report
