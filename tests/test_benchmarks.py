"""The benchmarks' common end: bars, a table, one line of JSON. What they measure is not tested here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "kit" / "report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """Load the file under its own name: the benchmarks are no part of what is installed."""
    spec = importlib.util.spec_from_file_location("benchmarks_report", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks_report"] = module
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
