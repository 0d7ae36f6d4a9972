"""Folders that are there whole or not at all: written beside, sealed by a manifest, put in place by a rename.

While a folder is replaced the old one is kept under another name until the new one stands in its place; a
crash in between leaves one of them complete: it is read where it lies (a reader never writes), and the next writer puts
it back. Nothing is replaced but a complete folder of this kind, with nothing in it that its manifest does not name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hetu_fx.base.documents import sync
from hetu_fx.checkpoint.manifest import MANIFEST, FileEntry, manifest_text
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.comm_ops.wire.consensus import from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError, HetuFxError, OtherRankError

MOST_LOOKS = 100
"""At a folder in which something is replaced each time: a look takes a millisecond, a save far longer."""


@contextmanager
def replaced_folder(folder: Path, table: GroupTable, error: type[HetuFxError] = CheckpointError) -> Iterator[Path]:
    """Give an empty folder to write in, on all ranks, that becomes `folder` when the block ends. Collective.

    Every rank may write files of its own names. Whatever fails inside, on any rank, leaves `folder` as it was, and
    nothing beside it. The ranks must share the file system. Of a symbolic link what it leads to is replaced.

    Raises:
        HetuFxError: `error`, on all ranks, where one cannot write, another process writes the same folder, or
            something stands there that is no complete folder of this kind.
    """
    folder = Path(os.path.realpath(folder))
    token = from_first(table, secrets.token_hex(4))
    staging = folder.parent / _left_over_name(folder.name, token, is_new=True)
    with ExitStack() as lock:
        try:
            raise_on_all_ranks(table, lambda: _begin(folder, staging, error, lock) if table.rank == 0 else None)
            try:
                yield staging
                raise_on_all_ranks(table, lambda: _sync_files(staging))
                raise_on_all_ranks(table, lambda: _commit(folder, staging, token) if table.rank == 0 else None)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
        except (OSError, OtherRankError) as problem:
            raise error(f"cannot write {folder}: {problem}; is the disk full, or not writable?") from problem


def _begin(folder: Path, staging: Path, error: type[HetuFxError], lock: ExitStack) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock.enter_context(_locked(folder, error))
    _settle(folder)
    if why := why_not_replaced(folder):
        raise error(
            f"{folder} is there, and would be replaced as a whole, but {why}\nhint: give a folder that does not exist, "
            "or move what is there away"
        )
    staging.mkdir()


@contextmanager
def _locked(folder: Path, error: type[HetuFxError]) -> Iterator[None]:
    """Be the only process that writes a folder; the lock goes with the process.

    Raises:
        HetuFxError: `error`, which says who writes it.
    """
    path = folder.parent / f".{folder.name}.writing"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not _lock(handle):
                who = os.read(handle, 200).decode(errors="replace") or "another process"
                raise error(f"{folder} is being written by {who}\nhint: give each run a folder of its own")
            if not _is_at(path, handle):  # who held it has removed it
                continue
            os.ftruncate(handle, 0)
            now = datetime.now().isoformat(" ", "seconds")
            os.write(handle, f"process {os.getpid()} of {socket.gethostname()} since {now}".encode())
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open file; tells whether no other process has. File systems without locks are taken at their word."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno == errno.EWOULDBLOCK:
            return False
        if problem.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def why_not_replaced(folder: Path) -> str:
    """Say what speaks against replacing what stands at a path; empty where nothing is lost but a complete folder."""
    if not os.path.lexists(folder):
        return ""
    try:
        if folder.is_dir() and not any(folder.iterdir()):
            return ""
        with OpenFolder(folder) as opened:
            opened.check_sizes()
            known = {MANIFEST, *(opened.manifest.files if opened.manifest else ())}
    except (OSError, CheckpointError) as problem:
        return f"it is no complete folder that hetu_fx wrote ({str(problem).splitlines()[0]})"
    foreign = sorted(name for name in _names(folder) if name not in known)
    return f"it holds {foreign[0]!r}, which is not of it" if foreign else ""


def _names(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all that is in a folder but folders with something in them."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in [*files, *links]:
            yield os.path.relpath(os.path.join(place, name), folder)
        if not files and not folders:
            yield os.path.relpath(place, folder)


def _sync_files(staging: Path) -> None:
    """Make what was written so far survive a power failure; every rank syncs, files may be on its own node."""
    for path in _files(staging):
        sync(path)


def _commit(folder: Path, staging: Path, token: str) -> None:
    """Put the new folder in the place of the old one; the old one goes only once the new one is there."""
    seal(staging)
    for part in sorted({path.parent for path in _files(staging)} | {staging}):
        sync(part)
    old = folder.parent / _left_over_name(folder.name, token, is_new=False)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(staging, folder)
    except OSError:
        with contextlib.suppress(OSError):  # it stays where it is found, too
            os.rename(old, folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write the sizes and sums of all files of a folder into its manifest, which makes it whole, and sync it."""
    path = folder / MANIFEST
    path.write_text(manifest_text({str(file.relative_to(folder)): FileEntry.of(file) for file in _files(folder)}))
    sync(path)


def _settle(folder: Path) -> None:
    """Put back what a crash in the middle of a replacement left under another name, and remove the rest; locked."""
    those = [left for left in left_overs(folder.parent) if left.name == folder.name]
    if not os.path.lexists(folder):
        whole = next((left for left in those if is_complete(left.path)), None)
        if whole is not None:
            os.rename(whole.path, folder)
            those.remove(whole)
    for left in those:
        shutil.rmtree(left.path)


def latest(parent: Path) -> Path | None:
    """Return the newest complete folder in `parent`, by the number that ends its name; None where there is none.

    Folders without a manifest, torn ones, and those that are being written are skipped. Of one whose replacement a
    crash has ended the name is returned, under which `load` finds it.

    Raises:
        CheckpointError: `parent` is there, but cannot be looked into.
    """
    if not os.path.lexists(parent):
        return None
    for _ in range(MOST_LOOKS):
        before = entries(parent)
        newest = _newest(parent, before)
        if entries(parent) == before:
            break
    return None if newest is None else parent / newest


def _newest(parent: Path, names: Iterable[str]) -> str | None:
    places = {left.name: left.path for left in reversed(left_overs(parent)) if is_complete(left.path)}
    places |= {name: parent / name for name in names if name[0] != "."}
    ages = {name: _age(name, place) for name, place in places.items() if is_complete(place)}
    return max(ages, key=lambda name: ages[name], default=None)


def _age(name: str, place: Path) -> tuple[int, float, str]:
    number = re.search(r"(\d+)$", name)
    try:
        return int(number[1]) if number else -1, (place / MANIFEST).stat().st_mtime, name
    except OSError:  # it is being replaced
        return -2, 0.0, name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A folder that is to be, or was, called `name`."""

    path: Path
    name: str
    is_new: bool


_LEFT_OVER = re.compile(r"\.(.+)\.(new|old)-[0-9a-f]{8}", re.DOTALL)


def _left_over_name(name: str, token: str, *, is_new: bool) -> str:
    """Return the name of a folder that is to be, or was, called `name`."""
    return f".{name}.{'new' if is_new else 'old'}-{token}"


def entries(parent: Path) -> dict[str, int]:
    """Return the inodes of what a folder holds, by name: others once it is replaced. Raises CheckpointError."""
    try:
        with os.scandir(parent) as found:
            return {entry.name: entry.inode() for entry in found}
    except OSError as error:
        raise CheckpointError(f"cannot read {parent}: {error.strerror}") from error


def left_overs(parent: Path) -> list[LeftOver]:
    """Return what lies in a folder under the names of replacements, new ones first. Raises CheckpointError."""
    found = [(name, match) for name in entries(parent) if (match := _LEFT_OVER.fullmatch(name))]
    those = [LeftOver(parent / name, match[1], match[2] == "new") for name, match in found]
    return sorted(those, key=lambda one: (not one.is_new, one.path))


def is_complete(folder: Path) -> bool:
    """Tell whether a folder has a manifest and all its files have their sizes."""
    try:
        with OpenFolder(folder) as opened:
            opened.check_sizes()
    except CheckpointError:
        return False
    return True


def find_folder(folder: Path) -> Path:
    """Return where a folder lies: under its name, or, where a crash left none of this name, under another."""
    if not os.path.lexists(folder) and folder.absolute().parent.is_dir():
        for left in left_overs(folder.absolute().parent):
            if left.name == folder.absolute().name and is_complete(left.path):
                return left.path
    return folder
