"""Exports of earlier versions load, though the modules that they name have moved since."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.errors import ExportError
from hetu_fx.export import OPS
from hetu_fx.export.load import load_exported
from hetu_fx.plans.plan import Plan

BEFORE = ["hetu_fx.comm_ops", "hetu_fx.transforms.random_ops"]
"""What the modules of the ops were called when exports began to name them."""

# In a process that knows none of our ops yet.
LOAD = """
import sys, torch
from hetu_fx.export.load import load_exported
exported, given = load_exported(sys.argv[1], "alone", 0), torch.load(sys.argv[2])
values = {(slot["kind"], slot["name"]): given[slot["name"]] for slot in exported.slots}
print(*(float(value) for (kind, _), value in exported(values).items() if kind == "loss"))
"""


class Dropping(nn.Module):
    """A model whose graph calls an op of ours: dropout is made by counting."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.dropout(self.linear(x)).square().mean()}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model: Any = Dropping()
    given = {name: value.detach().clone() for name, value in model.named_parameters()}
    given |= {"x": torch.randn(4, 3), "count_rows": torch.tensor(4.0), "random_state": torch.tensor([7, 3, 0])}
    hetu_fx.auto_parallelize(model, {"x": given["x"]}, plan=replace(Plan.single(), name="alone"))
    folder = tmp_path_factory.mktemp("written") / "export"
    model.hetu.export(folder)
    torch.save(given, folder.parent / "given.pt")
    return folder


def rewrite(export: Path, imports: list[str]) -> None:
    path = export / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "imports": imports}))


def test_only_the_manifest_names_modules_of_ours(export: Path) -> None:
    assert json.loads((export / "manifest.json").read_text())["imports"] == list(OPS)
    for path in export.rglob("*.pt2"):
        with zipfile.ZipFile(path) as archive:
            assert not [name for name in archive.namelist() if b"hetu_fx." in archive.read(name)]


@pytest.mark.parametrize("imports", [list(OPS), BEFORE], ids=["now", "before the moves"])
def test_an_export_loads_by_the_names_of_now_and_of_before(export: Path, imports: list[str]) -> None:
    rewrite(export, imports)
    command = [sys.executable, "-c", LOAD, str(export), str(export.parent / "given.pt")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=240)
    given = torch.load(export.parent / "given.pt")
    hidden = nn.functional.linear(given["x"], given["linear.weight"], given["linear.bias"])
    dropped = torch.ops.hetu.dropout(hidden, 0.5, given["random_state"], 0, 0, 1, [])
    assert float(done.stdout) == pytest.approx(float(dropped.square().mean()), rel=1e-6)


def test_modules_that_are_not_ours_are_not_imported(export: Path) -> None:
    rewrite(export, ["os"])
    with pytest.raises(ExportError, match="asks for module 'os', which is not part of hetu_fx"):
        load_exported(export, "alone", 0)
