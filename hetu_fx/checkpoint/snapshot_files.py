"""Parts of snapshots: who keeps whose, which a restarted job can go on from, and files in a node's memory.

Files are in a folder of shared memory, each there whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hetu_fx.base.machine import memory_name
from hetu_fx.base.words import bytes_text
from hetu_fx.checkpoint.snapshot_folders import job_folder
from hetu_fx.checkpoint.summed_files import SummedFile
from hetu_fx.checkpoint.tensor_files import Bounds, Key, RankShards, read_boxes
from hetu_fx.errors import CheckpointError


@dataclass(frozen=True, order=True, slots=True)
class SnapshotMoment:
    """A step's end in one life of the job (from one start of its processes to the next)."""

    step: int
    life: str
    world: int


@dataclass(frozen=True, order=True, slots=True)
class SnapshotPart:
    """What `owner` counts of the state at a moment, in the memory of rank `holder` of the same life."""

    moment: SnapshotMoment
    owner: int
    holder: int

    @property
    def file_name(self) -> str:
        """The name of the file that holds the part."""
        moment = self.moment
        return (
            f"step-{moment.step:012d}.life-{moment.life}.rank-{self.owner:05d}-of-{moment.world:05d}"
            f".held-by-{self.holder:05d}.safetensors"
        )


_NAME = re.compile(r"step-(\d+)\.life-([0-9a-f]+)\.rank-(\d+)-of-(\d+)\.held-by-(\d+)\.safetensors")


def read_name(name: str) -> SnapshotPart | None:
    """Return the part that a file of this name holds; None where it is no part's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    step, life, owner, world, holder = found.groups()
    return SnapshotPart(SnapshotMoment(int(step), life, int(world)), int(owner), int(holder))


def holders(nodes: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each rank the rank that keeps a copy of its part: on another node where there is one.

    Of several, one that keeps the fewest copies so far, then the next one after it. All on one node: the next rank.
    None for a rank that is alone.
    """
    world = len(nodes)
    kept = [0] * world
    chosen: list[int | None] = []
    for rank, node in enumerate(nodes):
        others = [other for other in range(world) if other != rank]
        candidates = [other for other in others if nodes[other] != node] or others
        best = min(candidates, key=lambda other: (kept[other], (other - rank) % world), default=None)
        if best is not None:
            kept[best] += 1
        chosen.append(best)
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The snapshot to go on from.

    Attributes:
        moment: the newest one of which every rank's part is there; None if there is none.
        nodes: for each owner, the nodes that have its part, sorted.
        lost: moments later than it that are incomplete, and the owners whose parts are nowhere.
    """

    moment: SnapshotMoment | None
    nodes: tuple[tuple[str, ...], ...] = ()
    lost: tuple[tuple[SnapshotMoment, tuple[int, ...]], ...] = ()


def choose(found: Mapping[str, Collection[SnapshotPart]]) -> SnapshotChoice:
    """Choose from the parts that each node has in its memory; ranks that know the same choose the same.

    A moment counts only if the parts of all ranks of its life are there: all of them finished that step.
    """
    where: dict[SnapshotMoment, dict[int, set[str]]] = {}
    for node, parts in found.items():
        for part in parts:
            where.setdefault(part.moment, {}).setdefault(part.owner, set()).add(node)
    lost: list[tuple[SnapshotMoment, tuple[int, ...]]] = []
    for moment in sorted(where, reverse=True):
        owners = where[moment]
        missing = tuple(rank for rank in range(moment.world) if rank not in owners)
        if not missing:
            nodes = tuple(tuple(sorted(owners[rank])) for rank in range(moment.world))
            return SnapshotChoice(moment, nodes, tuple(lost))
        lost.append((moment, missing))
    return SnapshotChoice(None, (), tuple(lost))


@dataclass(frozen=True, order=True, slots=True)
class PartTransfer:
    """One part to be copied from a rank's memory to that of another rank's node."""

    owner: int
    sender: int
    receiver: int


def plan_transfers(
    choice: SnapshotChoice, nodes: Sequence[str], needs: Sequence[Iterable[int]]
) -> tuple[PartTransfer, ...]:
    """Return what must travel so that each node has all the parts that its ranks need.

    Args:
        choice: says where parts are.
        nodes: of the ranks as they are now; a node's first rank sends and receives for it.
        needs: the owners whose parts each rank needs.
    """
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    wanted: dict[str, set[int]] = {node: set() for node in nodes}
    for node, owners in zip(nodes, needs, strict=True):
        wanted[node].update(owners)
    return tuple(
        PartTransfer(owner, first[choice.nodes[owner][0]], first[node])
        for node in sorted(wanted)
        for owner in sorted(wanted[node])
        if node not in choice.nodes[owner]
    )


FORMAT = "hetu_fx.snapshot/2"

_ASIDE = ".writing-"
_DOCUMENT = "document"

_log = logging.getLogger("hetu_fx.snapshots")


@dataclass(frozen=True, slots=True)
class Header:
    """What a part's file says of itself: its size in bytes, its boxes, and the JSON document beside them."""

    size: int
    boxes: tuple[tuple[Key, Bounds], ...]
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """The parts in one node's memory. Files are written under another name, then renamed."""

    folder: Path

    @classmethod
    def at(cls, folder: Path | None) -> SnapshotMemory:
        """Open this node's part of a folder (None: that of the job), made if need be. Raises CheckpointError."""
        place = (job_folder() if folder is None else folder.absolute()) / memory_name()
        with _guarded(place):
            place.mkdir(parents=True, exist_ok=True)
        return cls(place)

    def path(self, part: SnapshotPart) -> Path:
        """Return the path of a part's file."""
        return self.folder / part.file_name

    def parts(self) -> tuple[SnapshotPart, ...]:
        """Return the parts that are there."""
        with os.scandir(self.folder) as entries:
            found = [read_name(entry.name) for entry in entries]
        return tuple(sorted(part for part in found if part is not None))

    def write(self, part: SnapshotPart, pieces: RankShards, document: Mapping[str, Any]) -> int:
        """Write a part; return its size. Raises CheckpointError, with nothing left behind."""
        metadata = {"format": FORMAT, _DOCUMENT: json.dumps(document)}
        with self._unfinished(part, pieces.num_bytes) as aside:
            pieces.write(aside, metadata)
            size = aside.stat().st_size
            self._finish(part, aside)
        return size

    def allocate_part(self, part: SnapshotPart, size: int) -> Tensor:
        """Return memory for the bytes of a part that is to arrive, as a tensor of uint8; see `arrived`.

        Raises CheckpointError, with nothing left behind.
        """
        with self._unfinished(part, size) as aside:
            file = os.open(aside, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(file, 0, size)  # or the first write to a page that is not there ends the process
            finally:
                os.close(file)
            return torch.from_file(str(aside), shared=True, size=size, dtype=torch.uint8)

    def mark_arrived(self, part: SnapshotPart) -> None:
        """Tell that all of a part for which room was made is there. Raises CheckpointError."""
        with self._unfinished(part, 0) as aside:
            self._finish(part, aside)

    @contextlib.contextmanager
    def _unfinished(self, part: SnapshotPart, num_bytes: int) -> Iterator[Path]:
        """Give the path of a part that is not whole yet, in a folder that is gone where the block raises.

        It has a folder for itself, as safetensors writes to a file of a name of its own first.
        """
        aside = self.folder / f"{_ASIDE}{part.file_name}"
        with _guarded(self.folder, num_bytes):
            try:
                aside.mkdir(exist_ok=True)
                yield aside / part.file_name
            except BaseException:
                _remove(aside)
                raise

    def _finish(self, part: SnapshotPart, aside: Path) -> None:
        os.rename(aside, self.path(part))
        aside.parent.rmdir()

    def bytes_of(self, part: SnapshotPart) -> Tensor:
        """Return a part's file as a tensor of uint8; it is read when it is used."""
        path = self.path(part)
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def open(self, part: SnapshotPart) -> SummedFile:
        """Open a part's file. Raises CheckpointError where it is damaged, or of another format."""
        file = SummedFile(self.path(part))
        if file.metadata.get("format") != FORMAT:
            raise CheckpointError(f"{file.path} has format {file.metadata.get('format')!r}, expected {FORMAT!r}")
        if file.sum is None:
            raise CheckpointError(f"{file.path} is damaged: it has no sums")
        return file

    def header(self, part: SnapshotPart) -> Header:
        """Read what a part's file says of itself. Raises CheckpointError."""
        return _header(self.open(part))

    def sound_parts(self) -> tuple[SnapshotPart, ...]:
        """Return the parts that are there and have the sums of what was written; others are told by a warning."""
        return tuple(part for part in self.parts() if self._is_sound(part))

    def _is_sound(self, part: SnapshotPart) -> bool:
        try:
            file = self.open(part)
            _header(file)
            file.check_all()
        except CheckpointError as error:
            _log.warning("a part of a snapshot is left out: %s", error)
            return False
        return True

    def keep_only(self, moment: SnapshotMoment, holder: int) -> None:
        """Remove what rank `holder` keeps of other moments, and what anyone keeps of other lives."""
        for part in self.parts():
            if part.moment != moment and (part.holder == holder or part.moment.life != moment.life):
                self.path(part).unlink(missing_ok=True)

    def remove(self, holder: int) -> None:
        """Remove what a rank keeps, and folders that are empty then."""
        with contextlib.suppress(FileNotFoundError):  # another rank, which had the last files here, removes the folder
            for part in self.parts():
                if part.holder == holder:
                    self.path(part).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank still has files here
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def discard_part(self, moment: SnapshotMoment, holder: int) -> None:
        """Remove what rank `holder` keeps of a moment, finished or not; the folder itself may be gone."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            part = read_name(path.name.removeprefix(_ASIDE))
            if part is not None and (part.moment, part.holder) == (moment, holder):
                _remove(path)

    def remove_unfinished(self) -> None:
        """Remove what was being written when processes ended; nobody may be writing."""
        for path in self.folder.iterdir():
            if path.name.startswith(_ASIDE) and read_name(path.name.removeprefix(_ASIDE)) is not None:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it; others may do so at the same time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _header(file: SummedFile) -> Header:
    document = file.document(_DOCUMENT, constants=True)
    return Header(file.path.stat().st_size, tuple(read_boxes(file).values()), document)


@contextlib.contextmanager
def _guarded(where: Path, num_bytes: int = 0) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = bytes_text(shutil.disk_usage(where).free if where.is_dir() else 0)
        raise CheckpointError(
            f"cannot write a snapshot to {where}: {error}; it needs {bytes_text(num_bytes)}, and {free} are free\n"
            f"hint: make room there, or give another folder: snapshots(folder=...)"
        ) from error
