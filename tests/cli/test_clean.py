"""`hetu-fx clean` lists what jobs have left in memory, and removes it only when it is told to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetu_fx.checkpoint import snapshot_folders
from hetu_fx.checkpoint.snapshot_folders import job_folder
from hetu_fx.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that a job has left."""
    monkeypatch.setattr(snapshot_folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(snapshot_folders, "_held", {})
    left = job_folder().with_name("run-llama")
    left.mkdir()
    (left / "part").write_bytes(bytes(1000))
    return left


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {row["folder"]: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_what_is_stale_is_listed_and_removed_on_demand_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--json"]) == 0
    assert states(capsys) == {str(folder): "recent"}
    assert main(["clean", "--idle", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("stale          1 kB")
    assert "hint: hetu-fx clean --yes" in shown
    assert folder.exists()
    assert main(["clean", "--idle=0", "--yes", "--json"]) == 0
    assert states(capsys) == {str(folder): "removed"}
    assert not folder.exists()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "no job has snapshots in this node's memory\n"
