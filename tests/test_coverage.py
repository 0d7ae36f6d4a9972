"""The coverage benchmark's judgement: what counts as green; and that it runs families, whatever they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.workers.coverage import _worst

from benchmarks.coverage import YES, _is_green, _known_rows, _note, _options
from benchmarks.families.cells import PLANS, InFloat64, worst_difference
from benchmarks.families.families import FAMILIES

GOOD = {"differences": {"loss": 1e-12, "gradient": 1e-11}}
ROW = dict.fromkeys(("family", "kind", "captured", "rules", *PLANS, "reason"), "")


def noted(*records: dict[str, object]) -> dict[str, str]:
    row = ROW | {"captured": YES, "rules": YES}
    for plan, record in zip(PLANS, records, strict=True):
        _note(row, plan, record, FAMILIES["llama"])
    return row


def test_a_family_is_green_if_every_plan_agrees_within_the_limits() -> None:
    assert _is_green(noted(*[GOOD] * 5))
    assert not _is_green(noted(*[GOOD] * 5) | {"rules": "no"})


@pytest.mark.parametrize(
    ("record", "mark", "reason"),
    [
        ({"differences": {"loss": 0.0, "gradient": 1e-9}}, "wrong 1e-09", "TP2: differs by 1.0e-09"),
        ({"differences": {"loss": float("nan"), "gradient": 0.0}}, "wrong nan", "TP2: differs by nan"),
        ({"refused": "PlanError: no"}, "refused", "TP2: PlanError: no"),
        ({"broken": "a process died"}, "broken", "TP2: a process died"),
    ],
)
def test_one_bad_plan_is_marked_and_is_the_reason(record: dict[str, object], mark: str, reason: str) -> None:
    row = noted(GOOD, record, GOOD, GOOD, GOOD)
    assert not _is_green(row)
    assert (row["TP2"], row["reason"]) == (mark, reason)


def test_the_worst_record_of_the_ranks_stands() -> None:
    worse = {"differences": {"loss": 1e-12, "gradient": 1e-3}}
    assert _worst([GOOD, worse, GOOD]) is worse
    assert "refused" in _worst([worse, {"refused": "no"}])


def test_gradients_are_compared_against_their_norm_with_a_floor() -> None:
    large, tiny = torch.full((4,), 1.0), torch.full((4,), 1e-12)
    assert worst_difference([large * 1.5, tiny], [large, tiny]) == pytest.approx(0.5, rel=1e-4)
    assert worst_difference([large, tiny * 2], [large, tiny]) < 1e-6
    assert worst_difference([None, tiny], [large, tiny]) == pytest.approx(2.0)
    assert worst_difference([large, tiny * float("nan"), large], [large, tiny, large]) == float("inf")


def test_nothing_is_cast_down_from_float64() -> None:
    x, y = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float16)
    with InFloat64():
        found = (x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32), y.float())
    assert [value.dtype for value in found] == [torch.float64] * 3 + [torch.float32]


def test_rows_of_an_interrupted_run_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"cell": ["llama", "TP2"]}) + "\n" + json.dumps({"row": ROW | {"family": "gpt2"}}) + "\n")
    monkeypatch.setattr("sys.argv", ["coverage", "--resume", "--log", str(log)])
    assert list(_known_rows(_options())) == ["gpt2"]
