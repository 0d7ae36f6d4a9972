"""Device graphs run by their names, with `import hetu_fx` alone, in any order; other formats are refused."""

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
from hetu_fx.checkpoint.folders import seal
from hetu_fx.errors import ExportError
from hetu_fx.export.load import load_exported, load_single
from hetu_fx.plans.plan import Plan

# In a process that knows none of our ops yet.
LOAD = """
import {first}
import {second}
import sys, torch
given = torch.load(sys.argv[2])
module = torch.export.load(sys.argv[1]).module()
loss = module(**given)["loss"]
loss.backward()
print(float(loss), float(module.linear.weight.grad.norm()))
"""


class Dropping(nn.Module):
    """A model whose device graph calls an op of ours: dropout is made by counting."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.dropout(self.linear(x)).square().mean()}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model: Any = Dropping()
    given = {"x": torch.randn(4, 3), "count_rows": torch.tensor(4.0), "random_state": torch.tensor([7, 3, 0])}
    hetu_fx.auto_parallelize(model, {"x": given["x"]}, plan=replace(Plan.single(), name="alone"))
    folder = tmp_path_factory.mktemp("written") / "export"
    model.hetu.export(folder)
    torch.save(given, folder.parent / "given.pt")
    model.hetu.export(folder.parent / "bare", weights=False)
    return folder


def expected(export: Path) -> torch.Tensor:
    given, linear = torch.load(export.parent / "given.pt"), load_single(export, "training").get_submodule("linear")
    hidden = nn.functional.linear(given["x"], linear.weight, linear.bias)  # type: ignore[arg-type]
    dropped = torch.ops.hetu.dropout(hidden, 0.5, given["random_state"], 0, [0, 1, 1, 1], [])
    return dropped.square().mean()


@pytest.mark.parametrize("order", [("torch", "hetu_fx"), ("hetu_fx", "torch")], ids="then".join)
def test_a_device_graph_needs_nothing_but_the_import(export: Path, order: tuple[str, str]) -> None:
    script = LOAD.format(first=order[0], second=order[1])
    path = export / "variants" / "alone" / "rank0.pt2"
    command = [sys.executable, "-c", script, str(path), str(export.parent / "given.pt")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=240)
    loss, norm = map(float, done.stdout.split())
    assert loss == pytest.approx(float(expected(export).detach()), rel=1e-6)
    assert norm > 0


def test_importing_us_imports_no_torch_until_an_archive_is_read() -> None:
    code = "import sys, hetu_fx; assert 'torch' not in sys.modules; assert len(sys.meta_path) > 3"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["export", "bare"], ids=["weights inside", "weights beside"])
def test_a_loaded_rank_is_called_by_names(export: Path, name: str) -> None:
    loaded = load_exported(export.parent / name, "alone", 0)
    assert sorted(loaded.needs) == ["count_rows", "random_state", "x"]
    assert {n for n, _ in loaded.module.named_parameters()} == {"linear.weight", "linear.bias"}
    given = torch.load(export.parent / "given.pt")
    torch.testing.assert_close(loaded(**given)["loss"], expected(export))
    with pytest.raises(ExportError, match=r"takes \['count_rows', 'random_state', 'x'\] by keyword, not \['x'\]"):
        loaded(x=given["x"])


def test_no_file_names_paths_of_the_machine_that_wrote_it(export: Path) -> None:
    paths = {str(Path.home()), str(export.parent), str(Path(hetu_fx.__file__).parent), str(Path(torch.__file__).parent)}
    paths |= {str(Path(__file__).parent), sys.prefix, str(Path.cwd()), ".py"}
    for path in (p for folder in ("export", "bare") for p in (export.parent / folder).rglob("*") if p.is_file()):
        for name, content in contents_of(path):
            found = [told for told in paths if told.encode() in content]
            assert not found, f"{name} of {path} names {found}"


def contents_of(path: Path) -> list[tuple[str, bytes]]:
    if not zipfile.is_zipfile(path):
        return [(path.name, path.read_bytes())]
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def test_what_is_of_another_format_or_missing_is_refused_by_name(export: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "hetu_fx.export/1"}))
    seal(tmp_path)
    with pytest.raises(ExportError, match=r"has format 'hetu_fx\.export/1', this version reads 'hetu_fx\.export/3'"):
        load_exported(tmp_path, "alone", 0)
    with pytest.raises(ExportError, match=r"no single-device graph for inference: .*nothing but its loss"):
        load_single(export, "inference")
    with pytest.raises(
        ExportError, match=r"no graph of variant 'PP' for rank 0\nhint: name one of \{'alone': \['0'\]\}"
    ):
        load_exported(export, "PP", 0)


def test_an_export_of_another_torch_is_told_to_be_stale(export: Path, tmp_path: Path) -> None:
    manifest = json.loads((export / "manifest.json").read_text())
    single = export / manifest["single"]["graphs"]["training"]["file"]
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / single.name).write_bytes(single.read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "torch": "2.1.0"}))
    seal(tmp_path)
    with pytest.warns(UserWarning, match=r"is stale: it was written by torch 2\.1\.0"):
        load_single(tmp_path, "training")
