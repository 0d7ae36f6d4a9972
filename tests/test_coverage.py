"""The coverage benchmark's judgement: what counts as green; and that it runs families, whatever they do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.coverage import _is_green, _options
from benchmarks.families import trials
from benchmarks.families.cells import (
    AS_RANKS,
    LIMITS,
    PLANS,
    TORCH_COMPILE,
    InFloat64,
    Subject,
    cast,
    is_within_limits,
    worst_difference,
)
from benchmarks.families.families import FAMILIES
from benchmarks.families.family import Family
from benchmarks.families.trials import (
    CAPTURED,
    CRASH,
    NOT_PLAIN,
    PLAIN,
    REFUSED,
    Heard,
    _logged,
    row_of,
    tried,
    verdict,
)
from hetu_fx.errors import DivergedError, PlanError
from hetu_fx.lockstep import Lockstep

GOOD = {"differences": {"loss": 1e-12, "gradient": 1e-11}}
BEFORE: Heard = {PLAIN: {}, CAPTURED: {"unknown_ops": []}}
KINDS = {
    "complex rotations that q and k share": ("deepseek_v2 (dense)", "TP2"),
    "complex kernels": ("net: s4d", "DP 3:1"),
    "slices of complex tensors": ("net: fno", "TP2"),
    "random numbers like a tensor with a gradient": ("net: vae", "DP 3:1"),
    "in-place activations after batch norm": ("net: mobilenet_v3", "DP 3:1"),
    "a join of one tensor": ("net: densenet121", "TP2 + TP1"),
}
"""What plans have been wrong or refused for, with the cell in which that shows."""


ERROR = 1e-7


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x)).square().mean()


def inexact_sine(x: Tensor) -> Tensor:
    return torch.sin(x) + ERROR


def compiler_of(*sines: Any) -> Callable[..., Any]:
    """Return a compiler that makes these functions inexact."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            node.target = inexact_sine if node.target in sines else node.target
        module.recompile()
        return module.forward

    return compile_graph


def noted(*records: dict[str, object], **before: dict[str, object]) -> dict[str, str]:
    heard = {**BEFORE, **dict(zip(PLANS, records, strict=True)), **before}
    return row_of(FAMILIES["llama"], heard, tuple(PLANS))


def test_a_family_is_green_if_every_plan_agrees_within_the_limits() -> None:
    assert _is_green(noted(*[GOOD] * 5))
    assert not _is_green(noted(*[GOOD] * 5, captured={"unknown_ops": ["aten.unknown"]}))


@pytest.mark.parametrize(
    ("record", "mark", "reason"),
    [
        ({"differences": {"loss": 0.0, "gradient": 1e-9}}, "wrong 1e-09", "TP2: differs by 1.0e-09"),
        ({"differences": {"loss": float("nan"), "gradient": 0.0}}, "wrong nan", "TP2: differs by nan"),
        ({REFUSED: "PlanError: no"}, "refused", "TP2: PlanError: no"),
        ({CRASH: "a process died"}, "crash", "TP2: a process died"),
    ],
)
def test_one_bad_plan_is_marked_and_is_the_reason(record: dict[str, object], mark: str, reason: str) -> None:
    row = noted(GOOD, record, GOOD, GOOD, GOOD)
    assert not _is_green(row)
    assert (row["TP2"], row["reason"]) == (mark, reason)


@pytest.mark.parametrize(
    ("heard", "kind"),
    [
        ({}, NOT_PLAIN),
        ({PLAIN: {NOT_PLAIN: "ValueError: no such size"}}, NOT_PLAIN),
        ({PLAIN: {}}, CRASH),
        ({PLAIN: {}, CAPTURED: {REFUSED: "CaptureError: no"}}, REFUSED),
        (BEFORE, CRASH),
    ],
)
def test_every_cell_is_what_the_first_step_that_failed_says(heard: Heard, kind: str) -> None:
    assert verdict(FAMILIES["llama"], heard, "TP2").kind == kind


def test_reasons_are_counted_without_names_places_and_numbers() -> None:
    told = ["PlanError: 'add_1' (a.py:3) has 4 rows", "PlanError: 'mul' (b.py:17) has 11 rows", "PlanError: no"]
    assert dict(trials.counted(told)) == {"PlanError: '...' (line) has N rows": 2, "PlanError: no": 1}


@pytest.mark.parametrize(
    ("sines", "is_right"),
    [
        pytest.param((torch.sin, torch.ops.aten.sin.default), True, id="in whatever is compiled"),
        pytest.param((torch.ops.aten.sin.default,), False, id="in plans alone"),
    ],
)
def test_compiled_plans_may_be_as_far_from_plain_as_torch_compile(sines: Sequence[Any], is_right: bool) -> None:
    family = Family("wave", "net", Wave, lambda rows, length: {"x": torch.randn(rows, 3)}, micro_batches=1)
    subject = Subject(family, replace(AS_RANKS, backend=compiler_of(*sines)))
    subject.capture()
    found = subject.try_plan("DP 3:1")
    assert is_within_limits(found, family.dtype) == is_right
    assert (found.get(TORCH_COMPILE, 0.0) > ERROR / 10) == is_right
    told = verdict(family, {**BEFORE, "DP 3:1": {"differences": found}}, "DP 3:1")
    assert bool(told.reason.count("compared with torch.compile")) == is_right


@pytest.mark.parametrize("in_plans_alone", [False, True])
def test_what_torch_compile_fails_for_alike_is_no_crash_of_plans(in_plans_alone: bool) -> None:
    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_torchs = any(node.target is torch.sin for node in module.graph.nodes)
        if is_torchs and in_plans_alone:
            return module.forward
        raise AssertionError("expected size 8==8, stride 1==1024")

    family = Family("wave", "net", Wave, lambda rows, length: {"x": torch.randn(rows, 3)}, micro_batches=1)
    subject = Subject(family, replace(AS_RANKS, backend=compile_graph))
    subject.capture()
    record = trials.attempt(lambda: {"differences": subject.try_plan("DP 3:1")})
    assert (CRASH if in_plans_alone else NOT_PLAIN) in record


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_wrong_once_is_as_on_one_device(kind: str) -> None:
    name, plan = KINDS[kind]
    subject = Subject(FAMILIES[name])
    subject.capture()
    found = subject.try_plan(plan)
    assert max(found.values()) <= max(LIMITS[subject.family.dtype])


def test_a_family_that_dies_or_diverges_is_told_and_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, family: Family, how: Lockstep) -> None:
            self.name = family.name
            if self.name == "vit":
                raise ValueError("no such size")

        def capture(self) -> list[str]:
            if self.name == "opt":
                raise PlanError("no")
            return []

        def try_plan(self, plan: str) -> dict[str, float]:
            if self.name == "gpt2" and plan == "PP2":
                os._exit(1)
            if self.name == "bert" and plan == "TP2":
                raise DivergedError("ranks differ")
            return {"loss": 0.0, "gradient": 0.0}

    monkeypatch.setattr(trials, "Subject", Fake)
    monkeypatch.setattr("sys.argv", ["coverage"])
    families, plans = [FAMILIES[name] for name in ("gpt2", "bert", "vit", "opt", "llama")], tuple(PLANS)
    found = tried(families, plans, _options())
    rows = {family.name: row_of(family, found[family.name], plans) for family in families}
    assert [_is_green(row) for row in rows.values()] == [False, False, False, False, True]
    assert (rows["gpt2"]["TP2"], rows["gpt2"]["PP2"], rows["gpt2"]["TP2 + TP1"]) == ("0e+00", "crash", "crash")
    assert (rows["bert"]["TP2"], rows["bert"]["reason"]) == ("crash", "TP2: DivergedError: ranks differ")
    assert (rows["vit"]["TP2"], rows["vit"]["reason"]) == (NOT_PLAIN, "ValueError: no such size")
    assert (rows["opt"]["TP2"], rows["opt"]["reason"]) == ("refused", "PlanError: no")


def test_complex_weights_are_cast_with_both_numbers() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64))
    cast(module, torch.float64)
    assert module.weight.dtype is torch.complex128
    assert module.weight.item() == 1 + 2j


def test_gradients_are_compared_against_their_norm_with_a_floor() -> None:
    large, tiny = torch.full((4,), 1.0), torch.full((4,), 1e-12)
    assert worst_difference([large * 1.5, tiny], [large, tiny]) == pytest.approx(0.5, rel=1e-2)
    assert worst_difference([large, tiny * 2], [large, tiny]) < 1e-6
    assert worst_difference([None, tiny], [large, tiny]) == pytest.approx(2.0)
    assert worst_difference([large, tiny * float("nan"), large], [large, tiny, large]) == float("inf")


def test_nothing_is_cast_down_from_float64() -> None:
    x, y = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float16)
    with InFloat64():
        found = (x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32), y.float())
    assert [value.dtype for value in found] == [torch.float64] * 3 + [torch.float32]


def test_families_of_an_interrupted_run_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"family": "gpt2", "heard": {PLAIN: {NOT_PLAIN: "no"}}}) + "\n")
    monkeypatch.setattr("sys.argv", ["coverage", "--resume", "--log", str(log)])
    assert list(_logged(_options(), trials.AS_EVER)) == ["gpt2"]
    monkeypatch.setattr(trials, "Subject", None)  # nothing is left to try
    assert tried([FAMILIES["gpt2"]], tuple(PLANS), _options()) == {"gpt2": {PLAIN: {NOT_PLAIN: "no"}}}
