"""What is said of a script that comes out otherwise, hangs, crashes or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scripts import differences
from tests.scripts.job import Job
from tests.scripts.record import read, write
from tests.scripts.report import Found
from tests.scripts.run import run_all
from tests.scripts.script import Results, Script
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import Kind, Raised, Returned, Verdict, is_expected, judge


def _nothing(job: Job) -> Results:
    return {}


def _script(refused: str = "") -> Script:
    return Script("does nothing", "none", _nothing, refused)


def test_equal_results_are_right() -> None:
    one = Returned({"loss": torch.tensor(2.0), "text": "a", "losses": [1.0, 2.0]})
    assert judge(_script(), one, {0: one, 1: one}, 2).kind is Kind.RIGHT


@pytest.mark.parametrize(
    "other",
    [{"loss": torch.tensor(2.001)}, {"loss": torch.tensor([2.0])}, {"loss": torch.tensor(2.0).double()}, {}],
    ids=["value", "shape", "dtype", "missing"],
)
def test_a_difference_on_one_rank_is_found(other: dict[str, torch.Tensor]) -> None:
    one = Returned({"loss": torch.tensor(2.0)})
    assert judge(_script(), one, {0: one, 1: Returned(other)}, 2).kind is Kind.DIFFERENT


def test_a_rank_that_says_nothing_hangs_and_a_foreign_error_is_a_crash() -> None:
    one, foreign = Returned({}), Raised(False, "RuntimeError: invalid python storage", "")
    assert judge(_script(), one, {0: one}, 2).kind is Kind.HANG
    assert judge(_script(), one, {0: one, 1: foreign}, 2).kind is Kind.CRASH


def test_a_refusal_counts_where_it_is_announced_and_reaches_all_ranks() -> None:
    one, refusal = Returned({}), Raised(True, "StateError: call full_tensor() on every rank", "")
    announced, other = _script("full_tensor"), _script("something else")
    both = {0: refusal, 1: refusal}
    assert is_expected(announced, judge(announced, one, both, 2))
    assert not is_expected(_script(), judge(_script(), one, both, 2))
    assert judge(other, one, both, 2).kind is Kind.CRASH
    assert judge(announced, one, {0: refusal, 1: one}, 2).kind is Kind.CRASH


def test_what_a_record_holds_is_not_run_again(tmp_path: Path) -> None:
    path, hung = tmp_path / "record", Verdict(Kind.HANG, "ranks [1] said nothing", 60.0)
    for verdict in (Verdict(Kind.RIGHT, "", 1.0), hung):
        write(path, _script(), "one", verdict)
    assert list(run_all([_script()], [SETTINGS["one"]], read(path))) == [(_script(), SETTINGS["one"], hung)]


def test_a_page_has_a_line_for_each_setting_with_the_largest_difference_under_each_plan() -> None:
    found, other = Found(), Script("Trainer: bf16", "other", _nothing)
    found.add(_script(), "dp2", Verdict(Kind.RIGHT, differences={"a: loss": 0.25, "a: file w": 0.5, "b: loss": 0.0}))
    found.add(_script(), "tp2", Verdict(Kind.REFUSED, "why"))
    found.add(other, "dp2", Verdict(Kind.RIGHT, differences={"loss": 1e-9}))
    rows = [line for line in differences.page(found).splitlines() if line.startswith("| ") and "compared" not in line]
    assert rows == [
        "| a | loss, weights of files | 5.0e-01 | refused |",
        "| b | loss | 0 | refused |",
        "| bf16 | loss | 1.0e-09 | - |",
    ]


def test_what_most_lines_of_a_page_compare_is_said_once() -> None:
    found = Found()
    results = {f"{line}: {name}": 0.0 for line in "ab" for name in ("loss", "rate")} | {"c: loss": 0.0}
    found.add(_script(), "dp2", Verdict(Kind.RIGHT, differences=results))
    lines = differences.page(found).splitlines()
    assert "*all*: loss, rate." in lines
    assert lines[-3:] == ["| a | *all* | 0 |", "| b | *all* | 0 |", "| c | loss | 0 |"]


def test_what_is_compared_is_told_with_its_largest_difference() -> None:
    one, other = Returned({"loss": [1.0, 2.0], "text": "a"}), Returned({"loss": [1.0, 2.0 + 2e-10], "text": "a"})
    found = judge(_script(), one, {0: one, 1: other}, 2)
    assert found.differences == {"loss": pytest.approx(1e-10, rel=1e-3), "text": 0.0}
