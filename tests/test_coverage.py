"""The coverage benchmark's judgement: what counts as green; and that it runs families, whatever they do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import coverage
from benchmarks.coverage import CAPTURED, YES, _is_green, _known_rows, _note, _options, rows_of
from benchmarks.families.cells import LIMITS, PLANS, InFloat64, Subject, cast, worst_difference
from benchmarks.families.families import FAMILIES, Family
from hetu_fx.errors import DivergedError

GOOD = {"differences": {"loss": 1e-12, "gradient": 1e-11}}
ROW = dict.fromkeys(("family", "kind", CAPTURED, "rules", *PLANS, "reason"), "")
KINDS = {
    "complex rotations that q and k share": ("deepseek_v2 (dense)", "TP2"),
    "complex kernels": ("net: s4d", "DP 3:1"),
    "slices of complex tensors": ("net: fno", "TP2"),
    "random numbers like a tensor with a gradient": ("net: vae", "DP 3:1"),
    "in-place activations after batch norm": ("net: mobilenet_v3", "DP 3:1"),
    "a join of one tensor": ("net: densenet121", "TP2 + TP1"),
}
"""What plans have been wrong or refused for, with the cell in which that shows."""


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


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_wrong_once_is_as_on_one_device(kind: str) -> None:
    name, plan = KINDS[kind]
    subject = Subject(FAMILIES[name])
    found = subject.try_plan(plan)
    assert max(found.values()) <= max(LIMITS[subject.family.dtype])


def test_a_family_that_dies_or_diverges_is_told_and_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        unknown_ops = ()

        def __init__(self, family: Family) -> None:
            self.name = family.name

        def try_plan(self, plan: str) -> dict[str, float]:
            if self.name == "gpt2" and plan == "PP2":
                os._exit(1)
            if self.name == "bert" and plan == "TP2":
                raise DivergedError("ranks differ")
            return {"loss": 0.0, "gradient": 0.0}

    monkeypatch.setattr(coverage, "Subject", Fake)
    monkeypatch.setattr("sys.argv", ["coverage"])
    rows = {row["family"]: row for row in rows_of([FAMILIES[name] for name in ("gpt2", "bert", "llama")], _options())}
    assert [_is_green(row) for row in rows.values()] == [False, False, True]
    assert (rows["gpt2"]["TP2"], rows["gpt2"]["PP2"], rows["gpt2"]["TP2 + TP1"]) == ("0e+00", "broken", "broken")
    assert (rows["bert"]["TP2"], rows["bert"]["reason"]) == ("broken", "TP2: DivergedError: ranks differ")


def test_complex_weights_are_cast_with_both_numbers() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64))
    cast(module, torch.float64)
    assert module.weight.dtype is torch.complex128
    assert module.weight.item() == 1 + 2j


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
