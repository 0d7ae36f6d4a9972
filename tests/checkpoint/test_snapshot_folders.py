"""Folders of snapshots are a job's, not an agent's; nobody else gets in, and what lives is never taken for stale."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetu_fx.checkpoint import snapshot_folders
from hetu_fx.checkpoint.snapshot_folders import job_folder, job_folders, job_name
from hetu_fx.errors import CheckpointError

RANDOM = "0c8e9c1e-7f0d-4c1b-9b1e-1f2a3b4c5d6e"
NAMES = ("HETU_FX_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have another place for shared memory, and no job."""
    monkeypatch.setattr(snapshot_folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(snapshot_folders, "_held", held := {})
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    for descriptor in held.values():
        os.close(descriptor)


@contextmanager
def another_job(folder: Path, launcher: str) -> Iterator[None]:
    """Have a process that uses a folder; it ends with the block."""
    program = "import sys; from pathlib import Path; from hetu_fx.checkpoint.snapshot_folders import _use"
    program += "; _use(Path(sys.argv[1]), sys.argv[2]); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(folder), launcher]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        assert process.stdin is not None
        process.stdin.close()


def test_without_shared_memory_snapshots_are_among_temporary_files_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_folders, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "hetu_fx"):
        folder = job_folder()
    assert folder.parent == top(tmp_path)
    assert f"there is no {tmp_path / 'none'} to write to; snapshots are kept in {top(tmp_path)}" in caplog.text


def top(tmp_path: Path) -> Path:
    return tmp_path / f"hetu_fx_snapshots-{os.getuid()}"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": RANDOM}, None),
        ({"TORCHELASTIC_RUN_ID": "llama"}, "run-llama"),
        ({"TORCHELASTIC_RUN_ID": "llama", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "run-llama"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "slurm-7.0"),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"TORCHELASTIC_RUN_ID": "llama", "HETU_FX_JOB": "mine"}, "job-mine"),
    ],
)
def test_a_job_has_a_name_only_where_its_next_start_has_it_too(environment: dict[str, str], name: str | None) -> None:
    assert job_name(environment) == name


def test_a_job_with_a_name_finds_what_it_left_under_another_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../run/1")
    folder = job_folder()
    folder.mkdir()
    monkeypatch.setattr(snapshot_folders, "_launcher", lambda: "launcher-0-1-1")
    monkeypatch.setattr(snapshot_folders, "_held", {})
    monkeypatch.setattr(snapshot_folders, "_is_locked", lambda mark: False)  # those of the first launcher have ended
    assert job_folder() == folder == top(tmp_path) / "run-..%2Frun%2F1"
    assert folder.is_dir()


def test_scripts_without_a_name_that_one_shell_runs_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for script, argument in (("train.py", "--rank=0"), ("train.py", "--rank=1"), ("other.py", "--rank=0")):
        monkeypatch.setattr(sys, "argv", [script, argument])
        found.add(job_folder())
    assert len(found) == 2


def test_two_jobs_of_one_name_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_folders, "OTHERS_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "100")
    job_folder()
    with another_job(top(tmp_path) / "run-200", "launcher-0-1-1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "200")
        with pytest.raises(CheckpointError, match=r"by another job of the same name: processes of \['launcher-0"):
            job_folder()
    assert job_folder() == top(tmp_path) / "run-200"


def test_what_a_launcher_without_a_name_leaves_is_removed_once_it_is_gone_and_nothing_else(tmp_path: Path) -> None:
    own = job_folder()
    kept = [own, top(tmp_path) / "run-llama", top(tmp_path) / "launcher-1-4194304-1"]  # the last: another container's
    gone = Path(str(own).replace(f"-{os.getppid()}-", "-4194304-"))
    for folder in (*kept, gone):
        folder.mkdir()
    with another_job(gone, gone.name):  # its launcher is gone, a process of it is not
        job_folder()
        assert gone.is_dir()
    assert job_folder() == own
    assert [path for path in sorted(top(tmp_path).iterdir()) if path.is_dir()] == sorted(kept)
    assert not [path for path in top(tmp_path).iterdir() if path.name.endswith(gone.name)]


def test_what_is_used_is_told_from_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_JOB", "own")
    job_folder().mkdir()
    for name in ("run-lives", "run-gone"):
        (top(tmp_path) / name / "node").mkdir(parents=True)
        (top(tmp_path) / name / "node" / "part").write_bytes(bytes(100))
    with another_job(top(tmp_path) / "run-lives", "launcher-0-1-1"):
        found = {one.path.name: one for one in job_folders()}
        assert {name: one.is_used for name, one in found.items()} == {
            "job-own": True, "run-lives": True, "run-gone": False
        }  # fmt: skip
        assert found["run-gone"].num_bytes == 100
        assert [one.remove() for one in found.values()] == [False, True, False]
    assert sorted(path.name for path in top(tmp_path).iterdir() if path.is_dir()) == ["job-own", "run-lives"]


@pytest.mark.parametrize("how", ["a link", "open to others"])
def test_a_folder_that_is_not_the_users_alone_is_refused(tmp_path: Path, how: str) -> None:
    if how == "a link":
        (tmp_path / "elsewhere").mkdir()
        top(tmp_path).symlink_to(tmp_path / "elsewhere")
    else:
        top(tmp_path).mkdir()
        top(tmp_path).chmod(0o770)
    with pytest.raises(CheckpointError, match=f"is not a folder of user {os.geteuid()} alone"):
        job_folder()
    with pytest.raises(CheckpointError, match="hint: remove it"):
        job_folders()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    top(tmp_path).mkdir(mode=0o700)
    os.chown(top(tmp_path), 12345, 12345)
    with pytest.raises(CheckpointError, match="drwx------ of user 12345"):
        job_folder()
