"""What is stale, or damaged, is told: another torch, a model that has changed, a plan that differs, torn files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cli.main import main
from hetu_fx.export.load import check_exported
from hetu_fx.plans.plan import Plan

ALONE = replace(Plan.single(), name="alone")


class Small(nn.Module):
    def __init__(self, width: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.dropout(self.linear(x)).square().mean()}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "export"
    model: Any = hetu_fx.auto_parallelize(Small(), {"x": torch.randn(4, 3)}, plan=ALONE)
    model.hetu.export(folder)
    assert check_exported(folder, model=model).is_good  # the parallel model itself
    return folder


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: Small(), None),
        (lambda: nn.Linear(3, 2), "the model is a Linear, a Small was exported"),
        (lambda: Small(4), r"linear\.weight: float32\[2, 3\] -> float32\[2, 4\]"),
        (lambda: Small().double(), r"linear\.bias: float32\[2\] -> float64\[2\]"),
        (lambda: Small().requires_grad_(False), r"-> float32\[2, 3\] frozen"),
        (lambda: Small(dropout=0.1), "modules, or what they were made with, have changed"),
    ],
)
def test_a_model_that_has_changed_is_told(export: Path, model: Any, told: str | None) -> None:
    found = check_exported(export, model=model())
    assert found.is_good == (told is None)
    if told is not None:
        assert re.search(told, found.stale[0])


def test_a_plan_that_differs_is_told(export: Path) -> None:
    assert check_exported(export, plan=replace(ALONE, name="other")).is_good
    (told,) = check_exported(export, plan=Plan.data_parallel([0, 1])).stale
    assert told == "the plan differs from those of all exported variants (alone)"


def test_the_command_lists_checks_and_says_it_in_json(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exported", str(export), "--model", "tests.export.test_check:Small"]) == 0
    text = capsys.readouterr().out
    assert "training    single/training.pt2  x -> loss" in text
    assert "rank 0: variants/alone/rank0.pt2  pipeline 0, stage 0" in text
    assert main(["exported", str(tmp_path)]) == 2
    assert "is no export" in capsys.readouterr().err
    other = tmp_path / "plan.json"
    Plan.data_parallel([0, 1]).write(other)
    (export / "single" / "training.pt2").write_bytes(b"torn")
    assert main(["exported", str(export), "--plan", str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["stale"]) == 1
    assert "training.pt2 is torn: 4 bytes instead of" in found["damaged"][0]
