"""Folders that are there whole or not at all: written beside, checked by a manifest, put in place by a rename.

While a folder is replaced the old one is kept under another name until the new one stands in its place; a
crash in between leaves one of them complete, and `settle` puts that one back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetu_fx.base.documents import sync
from hetu_fx.comm_ops.wire.consensus import from_first, together
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError, HetuFxError, OtherRankError

MANIFEST = "hetu_fx_manifest.json"
FORMAT = "hetu_fx.folder/1"


@dataclass(frozen=True, slots=True)
class FolderKind:
    """What makes a folder whole.

    Attributes:
        error: what is raised where it cannot be written.
        is_whole: tells whether all of it is there.
        seal: writes what says so, on one rank, when all else is there.
    """

    error: type[HetuFxError]
    is_whole: Callable[[Path], bool]
    seal: Callable[[Path], None] = lambda _: None


@contextmanager
def replaced_folder(folder: Path, table: GroupTable, kind: FolderKind | None = None) -> Iterator[Path]:
    """Give an empty folder to write in, on all ranks, that becomes `folder` when the block ends. Collective.

    Every rank may write files of its own names. Whatever fails inside, on any rank, leaves `folder` as it was.
    The ranks must share the file system. `kind` is a checkpoint where it is left out. Raises the kind's error, on all
    ranks, where one cannot write.
    """
    folder, kind = folder.absolute(), kind or CHECKPOINT
    token = from_first(table, secrets.token_hex(4))
    staging = folder.parent / f".{folder.name}.new-{token}"
    try:
        together(table, lambda: _begin(folder, staging, kind) if table.rank == 0 else None)
        try:
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        together(table, lambda: _sync_files(staging))
        together(table, lambda: _commit(folder, staging, token, kind) if table.rank == 0 else None)
    except (OSError, OtherRankError) as error:
        raise kind.error(f"cannot write {folder}: {error}; is the disk full, or not writable?") from error


def _begin(folder: Path, staging: Path, kind: FolderKind) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    settle(folder, kind)
    for orphan in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(orphan)
    staging.mkdir()


def _sync_files(staging: Path) -> None:
    """Make what was written so far survive a power failure; every rank syncs, files may be on its own node."""
    for path in _files(staging):
        sync(path)


def _commit(folder: Path, staging: Path, token: str, kind: FolderKind) -> None:
    """Put the new folder in the place of the old one; the old one goes only once the new one is there."""
    kind.seal(staging)
    for part in sorted({path.parent for path in _files(staging)}):
        sync(part)
    old = folder.parent / f".{folder.name}.old-{token}"
    if folder.exists():
        os.rename(folder, old)
    os.rename(staging, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    """Write the sizes and SHA-256 sums of all files of a folder into its manifest, and sync it."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in _files(folder)
    }
    path = folder / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n")
    sync(path)


def check_folder(folder: Path, *, sums: bool = False) -> None:
    """Raise CheckpointError unless every file that the manifest names has its size (and its SHA-256 sum)."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: {MANIFEST} is missing; use latest(parent)")
    try:
        files = json.loads(path.read_text())["files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for name, expected in sorted(files.items()):
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"]:
            raise CheckpointError(f"{file} is torn: {size} bytes instead of {expected['bytes']}")
        if sums and digest(file) != expected["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 sum is not that of the manifest")


def is_complete(folder: Path) -> bool:
    """Tell whether a folder has a manifest and all its files have their sizes."""
    try:
        check_folder(folder)
    except CheckpointError:
        return False
    return True


CHECKPOINT = FolderKind(CheckpointError, is_complete, _write_manifest)


def settle(folder: Path, kind: FolderKind = CHECKPOINT) -> None:
    """Put back what a crash in the middle of a replacement left under another name; one process alone."""
    folder = folder.absolute()
    if folder.exists():
        for old in folder.parent.glob(f".{folder.name}.old-*"):
            shutil.rmtree(old)
        return
    for name in ("new", "old"):
        for left in sorted(folder.parent.glob(f".{folder.name}.{name}-*")):
            if kind.is_whole(left):
                os.rename(left, folder)
                return


def latest(parent: Path) -> Path | None:
    """Return the newest complete folder in `parent`, by the number that ends its name, or None.

    Folders without a manifest, torn ones, and those that were being written are skipped.
    """
    if not parent.is_dir():
        return None
    complete = [path for path in parent.iterdir() if path.is_dir() and path.name[0] != "." and is_complete(path)]
    return max(complete, key=_age, default=None)


def _age(path: Path) -> tuple[int, float, str]:
    number = re.search(r"(\d+)$", path.name)
    return int(number[1]) if number else -1, (path / MANIFEST).stat().st_mtime, path.name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def digest(path: Path) -> str:
    """Return the SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
