"""Memory of other processes of this machine: read where it is, or where they have packed for others; nothing is sent.

Linux copies from one process to another (`process_vm_readv`, known as cross-memory attach from MPI libraries and UCX)
where the reader might also trace the other: same user, same namespace of processes, no filter of system calls and no
security module (such as Yama at a `ptrace_scope` above 0) that forbids it. Then nothing is packed, and there is no room
for messages (`PeerMemory`).

What is not read in the sender's own parts is packed in memory that processes share (`NodeMemory`). Messages over a
loopback connection are copied twice by the system, and wait for its threads; here the receiver takes its slices where
the sender has packed them. Who shares memory with whom is found by trying: a file of a name that nobody can guess is
there or is not. Where there is none (another machine, a container of its own, no room), messages are sent.

Whether all ranks may do the one or the other is found by trying, once per group table.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.bsr_messages import Messages, Room
from hetu_fx.comm_ops.wire.consensus import all_gather_object, any_rank
from hetu_fx.comm_ops.wire.flat import is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers.memory import system_call
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate.byte_runs import Extents, SliceRead, extent_ends, next_extents

MOST_EXTENTS = 1024
"""What one system call takes (IOV_MAX of Linux)."""

_TOKEN_BYTES = 32

ReadOnce = Callable[[int, Extents, Extents], int]


@dataclass(frozen=True)
class PeerMemory:
    """The processes of the ranks, all of which this rank can read.

    Attributes:
        processes: their ids, by rank.
    """

    processes: tuple[int, ...]

    def take(self, reads: Iterable[SliceRead], senders: Extents, own: Sequence[Tensor | None]) -> None:
        """Copy slices of the ranks' parts into this rank's.

        Args:
            reads: what is read.
            senders: the addresses of parts, by rank and tensor.
            own: this rank's new parts, dense, by tensor.

        Raises:
            StateError: a process has gone, or its memory cannot be read any more.
        """
        places = np.array([0 if part is None else part.data_ptr() for part in own], dtype=np.int64)
        for read in reads:
            self._take(read.sender, *read.at(senders[read.sender], places))

    def _take(self, sender: int, taken: Extents, placed: Extents) -> None:
        process = self.processes[sender]
        try:
            copy(process, taken, placed)
        except OSError as error:
            raise StateError(
                f"{int(taken[:, 1].sum())} bytes of rank {sender} could not be read from process {process}: "
                f"{error.strerror}; if it runs, its memory was forbidden meanwhile to be read"
            ) from error


def copy(process: int, taken: Extents, placed: Extents, read_once: ReadOnce | None = None) -> None:
    """Copy extents of a process's memory into as many bytes of this one's; goes on where the system stopped early.

    Raises OSError where the memory cannot be read.
    """
    read_once = read_once or _read_once
    sides = [(side, extent_ends(side)) for side in (taken, placed)]
    done, total = 0, int(taken[:, 1].sum())
    while done < total:
        done += read_once(process, *(next_extents(side, ends, done, MOST_EXTENTS) for side, ends in sides))


def _read_once(process: int, taken: Extents, placed: Extents) -> int:
    """Copy some bytes, at least one; tells how many."""
    sides = [(ctypes.c_void_p(side.ctypes.data), ctypes.c_ulong(len(side))) for side in (placed, taken)]
    count = int(system_call()(process, *sides[0], *sides[1], ctypes.c_ulong(0)))
    if count <= 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) if count else "nothing was read")
    return count


_found: WeakKeyDictionary[GroupTable, PeerMemory | None] = WeakKeyDictionary()


def all_reach(table: GroupTable, parts: Sequence[Tensor]) -> PeerMemory | None:
    """Return the ranks' memory if all can read it and all their `parts` are dense in host memory; collective.

    Whether ranks can read each other's memory is found by trying, once.
    """
    if table not in _found:
        _found[table] = _tried(table)
    found = _found[table]
    if found is None:
        return None
    is_able = all(part.device.type == "cpu" and is_dense(part) for part in parts)
    return None if any_rank(table, [not is_able])[0] else found


def _tried(table: GroupTable) -> PeerMemory | None:
    """Read a word that nobody can guess from every rank; collective."""
    word = np.frombuffer(os.urandom(_TOKEN_BYTES), dtype=np.uint8)
    told = all_gather_object(table, (os.getpid(), word.ctypes.data, word.tobytes()))
    failed = any(_word_at(process, address) != expected for process, address, expected in told)
    return None if any_rank(table, [failed])[0] else PeerMemory(tuple(process for process, _, _ in told))


def _word_at(process: int, address: int) -> bytes | None:
    """Read a word; None where that process's memory cannot be read, or this system has no way to."""
    found = np.zeros(_TOKEN_BYTES, dtype=np.uint8)
    taken, placed = (np.array([[start, _TOKEN_BYTES]], dtype=np.int64) for start in (address, found.ctypes.data))
    try:
        copy(process, taken, placed)
    except (OSError, AttributeError):
        return None
    return found.tobytes()


def gather_addresses(parts: Sequence[Tensor | None], table: GroupTable) -> Extents:
    """Return where all ranks' parts stand in their memory, by rank and tensor; collective."""
    own = tuple(0 if part is None else part.data_ptr() for part in parts)
    return np.array(all_gather_object(table, own), dtype=np.int64)


SHARED_MEMORY = Path("/dev/shm")

_PAGE = 4096


@dataclass(frozen=True)
class NodeMemory:
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
        _shared[table] = not any_rank(table, [len(found.others) < table.size - 1])[0]
    return _shared[table]


def share(table: GroupTable, room_bytes: int | None, num_rooms: int) -> NodeMemory:
    """Give this rank rooms that others can read, of at least `room_bytes` each, and open theirs; collective.

    None is for a rank whose messages are not in host memory: it has nothing to read or to be read.
    """
    path, own = _made(_page_multiple(room_bytes or 0) * num_rooms)
    try:
        told = all_gather_object(table, (str(path), 0 if own is None else own.numel()))
        reads = [] if room_bytes is None else [rank for rank in range(table.size) if rank != table.rank]
        opened = {rank: _opened(Path(told[rank][0]), told[rank][1]) for rank in reads}
        seen = {rank: memory for rank, memory in opened.items() if memory is not None}
        readers = [rank for rank, read in enumerate(all_gather_object(table, tuple(seen))) if table.rank in read]
    finally:
        path.unlink(missing_ok=True)  # it stays as long as somebody has it open
    rooms = {rank: memory.chunk(num_rooms) for rank, memory in seen.items()}
    return NodeMemory(() if own is None else own.chunk(num_rooms), rooms, frozenset(readers))


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
