"""Memory that processes of one machine share: what one packs there, another reads, and nothing is sent.

Messages over a loopback connection are copied twice by the system, and wait for its threads; here the receiver takes
its slices where the sender has packed them. It is for what `peer_memory` does not read in the sender's own parts. Who
shares memory with whom is found by trying: a file of a name that nobody can guess is there or is not. Where there is
none (another machine, a container of its own, no room), messages are sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.bsr_messages import Messages, Room
from hetu_fx.comm_ops.wire.consensus import any_of, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable

SHARED_MEMORY = Path("/dev/shm")

_PAGE = 4096


@dataclass(frozen=True)
class SharedMemory:
    """What this rank has packed for others, and what others have packed that it can read.

    Attributes:
        own: this rank's memory in equal rooms; empty if it has none to share.
        others: memory of other ranks, in rooms as well, by rank.
        readers: the ranks that read this rank's memory.
    """

    own: tuple[Tensor, ...] = ()
    others: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()

    def unsent(self, messages: Messages) -> Messages:
        """Leave out what is read where it has been packed."""
        arriving = {rank: message for rank, message in messages.arriving.items() if rank not in self.others}
        leaving = {rank: message for rank, message in messages.leaving.items() if rank not in self.readers}
        here = {rank: message for rank, message in messages.arriving.items() if rank in self.others}
        return Messages(arriving, leaving, messages.device, here)


class ReadingRoom(Room):
    """Gives for some senders the places where their messages stand already, and room for the others'."""

    def __init__(self, room: Room, places: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._room, self._places = room, places

    def take(self, sizes: Mapping[int, int], device: torch.device) -> dict[int, Tensor]:
        """Give so many bytes for each peer; see `Room.take`."""
        lacking = {peer: size for peer, size in sizes.items() if peer not in self._places}
        taken = {**self._places, **self._room.take(lacking, device)}
        return {peer: taken[peer] for peer in sizes}


_shared: WeakKeyDictionary[GroupTable, bool] = WeakKeyDictionary()


def all_share(table: GroupTable, is_able: bool) -> bool:
    """Tell whether all ranks can read each other's memory; found by trying, once. Collective.

    `is_able`: this rank's messages are in host memory; see `share`.
    """
    if table not in _shared:
        found = share(table, 1 if is_able else None, 1)
        _shared[table] = not any_of(table, [len(found.others) < table.size - 1])[0]
    return _shared[table]


def share(table: GroupTable, room_bytes: int | None, num_rooms: int) -> SharedMemory:
    """Give this rank rooms that others can read, of at least `room_bytes` each, and open theirs; collective.

    None is for a rank whose messages are not in host memory: it has nothing to read or to be read.
    """
    path, own = _made(_page_multiple(room_bytes or 0) * num_rooms)
    try:
        told = of_all(table, (str(path), 0 if own is None else own.numel()))
        reads = [] if room_bytes is None else [rank for rank in range(table.size) if rank != table.rank]
        opened = {rank: _opened(Path(told[rank][0]), told[rank][1]) for rank in reads}
        seen = {rank: memory for rank, memory in opened.items() if memory is not None}
        readers = [rank for rank, read in enumerate(of_all(table, tuple(seen))) if table.rank in read]
    finally:
        path.unlink(missing_ok=True)  # it stays as long as somebody has it open
    rooms = {rank: memory.chunk(num_rooms) for rank, memory in seen.items()}
    return SharedMemory(() if own is None else own.chunk(num_rooms), rooms, frozenset(readers))


def _page_multiple(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _made(num_bytes: int) -> tuple[Path, Tensor | None]:
    """Make memory of a name; None where there is none to be had."""
    path = SHARED_MEMORY / f"hetu_fx_switch-{uuid4().hex}"
    if num_bytes == 0:
        return path, None
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # or the first write to a page that is not there ends the process
        finally:
            os.close(file)
        return path, _mapped(path, num_bytes)
    except (OSError, RuntimeError):
        path.unlink(missing_ok=True)
        return path, None


def _opened(path: Path, num_bytes: int) -> Tensor | None:
    """Open another process's memory; None where it is not on this machine."""
    try:
        return _mapped(path, num_bytes) if num_bytes and path.stat().st_size == num_bytes else None
    except (OSError, RuntimeError):
        return None


def _mapped(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
