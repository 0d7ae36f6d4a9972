"""`hetu-fx-align` finds a wrong op and says so by its table, its JSON, its files and its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetu_fx.transforms.rewrites.op_overrides import OpOverrides
from hetu_fx_align.command import main

SCRIPT = """
import torch
from torch import nn

from hetu_fx_align.way import Way


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 2)

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.down(torch.relu(self.norm(self.up(x)))), y)}


def made():
    return Net(), {"x": torch.randn(8, 6), "y": torch.randn(8, 2)}


def wrong():
    return Way("wrong", replaced={"aten.layer_norm.default": lambda op, *args: op(*args) * 1.01})


def no_way():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "my_net.py").write_text(SCRIPT)
    return tmp_path / "my_net.py"


def test_honest_dtypes_are_within_and_the_table_has_a_row_per_op_and_way(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{script}:made", "--dtype", "fp32", "--worst", "2"]) == 0
    head, *rows, summary, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["op", "class", "sizes", "module"]
    assert [row.split()[-1] for row in rows] == ["within"] * 4
    assert summary == "5 distinct ops of 5; all are within what is allowed"
    assert first.startswith("fp32: loss ")
    assert second.endswith("; no module drifts")


def test_a_wrong_op_is_named_saved_replayed_and_overridden(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = f"--ways=fp32,{script}:wrong"
    files = [f"--save={tmp_path / 'ops'}", f"--overrides={tmp_path / 'align.json'}"]
    assert main([f"{script}:made", ways, "--worst=1", *files]) == 1
    told = capsys.readouterr().out
    assert "1 are not within what is allowed: aten.layer_norm.default" in told
    assert "the output of module norm drifts first, by 1.0e-02" in told
    assert OpOverrides.read(tmp_path / "align.json").ops == {"aten.layer_norm.default": "up-cast"}
    saved = tmp_path / "ops" / "01-aten.layer_norm.default.json"
    assert main(["--replay", str(saved), ways, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [way["verdict"] for way in found["ops"][0]["ways"]] == ["within", "differs"]
    assert main(["--replay", str(saved), ways, "--tolerance", "aten.layer_norm.default=0.1"]) == 0


def test_json_has_ops_runs_and_overrides(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{script}:made", "--ways=eager", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"ways", "within", "ops", "whole", "overrides"}
    assert {op["op"] for op in found["ops"]} >= {"aten.linear.default", "aten.layer_norm.default"}
    assert {module["module"] for module in found["whole"][0]["modules"]} == {"up", "norm", "down", ""}


@pytest.mark.parametrize(("factor", "status"), [(1.01, 0), (1.02, 1)])
def test_losses_of_two_trainings_are_compared(
    factor: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = [1.0 + 1.0 / step for step in range(1, 301)]
    (tmp_path / "a.json").write_text(json.dumps([factor * loss for loss in reference]))
    (tmp_path / "b.json").write_text(json.dumps(reference))
    assert main(["--losses", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == status
    assert capsys.readouterr().out.startswith("NOT alike" if status else "alike")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give one of SCRIPT:FUNCTION"),
        (["my:model", "--replay=x.json"], "give one of SCRIPT:FUNCTION"),
        (["SCRIPT:made", "--ways=fp32,bf61"], "did you mean 'bf16'?"),
        (["SCRIPT:made", "--ways=SCRIPT:no_way"], "returns int, no hetu_fx_align.way.Way"),
        (["SCRIPT:made", "--dtype=bf61"], "did you mean 'bf16'?"),
        (["SCRIPT:made", "--tolerance=aten.relu.default"], "has no number"),
        (["SCRIPT:made", "--tolerance=aten.rely.default=1"], "did you mean 'aten.relu.default'?"),
        (["SCRIPT:made", "--overrides=/no/folder/align.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], says: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("SCRIPT", str(script)) for word in words]) == 2
    assert says in capsys.readouterr().err
