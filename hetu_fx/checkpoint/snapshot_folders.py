"""Where a job keeps its snapshots on a node: a folder of shared memory that is named by the job, and who uses it.

All folders of a user are in one, which nobody else may enter. Every process of a job holds a lock on a file beside the
job's folder, named by its launcher, for as long as it lives. So whoever else comes knows whether the job still runs,
also from another container, which sees the memory and not the processes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from hetu_fx.base.machine import pid_namespace, start_time
from hetu_fx.errors import CheckpointError

JOB_VARIABLE = "HETU_FX_JOB"
SHARED_MEMORY = Path("/dev/shm")
OTHERS_SECONDS = 10.0
"""For so long the processes of a launcher that has died may take to end."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_LAUNCHER = re.compile(r"launcher-(\d+)-(\d+)-(\d+)(?:-[0-9a-f]{8})?")
_USED_BY = ".used-by-"
_LONGEST_NAME = 150
_PAUSE_SECONDS = 0.1

_log = logging.getLogger("hetu_fx.snapshots")


def job_name(environment: Mapping[str, str]) -> str | None:
    """Return a name of the job that its next start has too: the user's, the rendezvous's, or that of a Slurm step.

    None where there is none. torchrun calls a job "none" if nobody names it, and by a random UUID if it is
    `--standalone`. A Slurm job without a step may run several trainings at once.
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if own := environment.get(JOB_VARIABLE):
        return f"job-{own}"
    if run_id not in ("", "none") and not _UUID.fullmatch(run_id):
        return f"run-{run_id}"
    if (job := environment.get("SLURM_JOB_ID")) and (step := environment.get("SLURM_STEP_ID")):
        return f"slurm-{job}.{step}"
    return None


def job_folder() -> Path:
    """Return where the processes of this job keep snapshots on this node; it need not be there yet.

    A job without a name has that of its launcher (the parent process) and its script, so that workers that are started
    again find what those before them left, and another script that a shell runs next does not. Folders of such
    launchers that are gone are removed: no other job finds them.

    Raises:
        CheckpointError: the user's folder is not theirs alone, or another job of this name uses it.
    """
    top, launcher = _own_folder(_top()), _launcher()
    if top.parent != SHARED_MEMORY:
        _log.warning("there is no %s to write to; snapshots are kept in %s", SHARED_MEMORY, top)
    name = job_name(os.environ)
    folder = top / (f"{launcher}-{_script()}" if name is None else _file_name(name))
    _use(folder, launcher)
    _remove_unnamed(top)
    return folder


@dataclass(frozen=True, slots=True)
class JobFolder:
    """What a job keeps, or has left, in a node's memory.

    Attributes:
        path: its folder.
        num_bytes: the size of its files.
        idle_seconds: since something was written there.
        is_used: a process of it lives, or its launcher.
    """

    path: Path
    num_bytes: int
    idle_seconds: float
    is_used: bool

    def remove(self) -> bool:
        """Remove it and return True, or False if its job lives. Raises CheckpointError where that fails."""
        if _is_used(self.path):
            return False
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot remove {self.path}: {error}") from error
        for mark in _marks(self.path):
            mark.unlink(missing_ok=True)
        return True


def job_folders() -> tuple[JobFolder, ...]:
    """Return the folders of this user's jobs on this node, by name. Raises CheckpointError as `job_folder` does."""
    top = _top()
    return tuple(map(_looked_at, _folders(_own_folder(top)))) if top.exists() else ()


def _top() -> Path:
    """Return the folder of all jobs of this user: in shared memory, or among temporary files where there is none."""
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return place / f"hetu_fx_snapshots-{os.getuid()}"


def _folders(top: Path) -> list[Path]:
    return sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())


def _looked_at(folder: Path) -> JobFolder:
    found = [folder.lstat()]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found.append(os.lstat(os.path.join(place, name)))
            except FileNotFoundError:  # the job goes on meanwhile
                continue
    size = sum(one.st_size for one in found if stat.S_ISREG(one.st_mode))
    return JobFolder(folder, size, max(0.0, time.time() - max(one.st_mtime for one in found)), _is_used(folder))


def _own_folder(path: Path) -> Path:
    """Return a folder that nobody but this user can have anything in, made if need be. Its name can be guessed."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"cannot make {path} for snapshots: {error}\nhint: give snapshots(folder=...)") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{path} is not a folder of user {os.geteuid()} alone: {stat.filemode(found.st_mode)} of user "
            f"{found.st_uid}; that user could read or replace snapshots\n"
            f"hint: remove it, or give snapshots(folder=...)"
        )
    return path


def _launcher() -> str:
    """Return a name of the parent process that no other process has on this machine."""
    parent = os.getppid()
    return f"launcher-{pid_namespace()}-{parent}-{start_time(parent)}"


def _script() -> str:
    """Return a short name of the script that this process runs; its arguments may differ between ranks."""
    path = os.path.realpath(sys.argv[0] if sys.argv else "")
    return sha256(path.encode(errors="surrogateescape")).hexdigest()[:8]


def _file_name(name: str) -> str:
    return quote(name, safe="")[:_LONGEST_NAME]


# Files whose locks are held for as long as this process lives, also between two runs of a script in it.
_held: dict[Path, int] = {}


def _use(folder: Path, launcher: str) -> None:
    """Say that this process uses a job's folder; wait for those of another launcher of the same name to end."""
    own = folder.with_name(f"{folder.name}{_USED_BY}{launcher}")
    if own not in _held or not own.exists():
        descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[own] = descriptor
    deadline = time.monotonic() + OTHERS_SECONDS
    while others := [mark for mark in _marks(folder) if mark != own and _is_locked(mark)]:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"the snapshots in {folder} are used by another job of the same name: processes of "
                f"{[mark.name.partition(_USED_BY)[2] for mark in others]} live\n"
                f"hint: name each job, by {JOB_VARIABLE} or torchrun's --rdzv-id, or give snapshots(folder=)"
            )
        time.sleep(_PAUSE_SECONDS)


def _marks(folder: Path) -> list[Path]:
    """Return the files of those who use, or have used, a job's folder."""
    start = f"{folder.name}{_USED_BY}"
    return [path for path in folder.parent.iterdir() if path.name.startswith(start)]


def _is_locked(mark: Path) -> bool:
    try:
        descriptor = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_used(folder: Path) -> bool:
    """Tell whether a process of a job lives, or a launcher of it, which may be about to start some."""
    marks = _marks(folder)
    launchers = (folder.name, *(mark.name.partition(_USED_BY)[2] for mark in marks))
    return any(map(_is_locked, marks)) or any(map(_lives, launchers))


def _lives(launcher: str) -> bool | None:
    """Tell whether a launcher of this name lives; None where that cannot be seen from here."""
    found = _LAUNCHER.fullmatch(launcher)
    if found is None or int(found[1]) != pid_namespace():
        return None
    return str(start_time(int(found[2]))) == found[3]


def _has_gone(launcher: str) -> bool:
    return _lives(launcher) is False


def _remove_unnamed(top: Path) -> None:
    """Remove what launchers have left that ran here and are gone: their marks, and folders that had no other name."""
    for folder in _folders(top):
        if _has_gone(folder.name) and not _is_used(folder):
            _log.info("%s is removed: its launcher is gone, and the job had no name", folder)
            shutil.rmtree(folder, ignore_errors=True)  # other processes of this job do so at the same time
    for mark in [path for path in top.iterdir() if _has_gone(path.name.partition(_USED_BY)[2])]:
        if not _is_locked(mark):
            mark.unlink(missing_ok=True)
