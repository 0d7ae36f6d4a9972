"""Ranks that can read each other's memory: who they are, what they say, and how they wait for each other.

A message over a loopback connection is copied twice by the system, piece by piece, by threads that wait for each other.
Linux also copies from one process to another in one go (`process_vm_readv`, known as cross-memory attach from MPI
libraries and UCX) where the reader might trace the other: same user, same namespace of processes, nothing that forbids
it. Whether ranks can is found by trying, once per group of them; those of other network namespaces count as of another
machine.

Every rank has a board, on which it writes where its buffers stand, and how far it is; the others look there. What is
made for others to read stands in an area that they have mapped (`rooms`), where they can.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.peers.rooms import Area, Mapped, Room, area, is_room, mapped_areas

LEAST_BYTES = 1 << 12
"""Smaller messages are sent."""

BOARD_SLOTS = 1 << 16
"""Of a board: 2 MB."""

SPIN_SECONDS, SLEEP_SHARE, MOST_SLEEP_SECONDS = 2e-4, 0.02, 1e-3
"""For how long a rank that waits looks again and again; it then sleeps a share of the time so far, up to a bound."""

_MOST_EXTENTS = 1024  # IOV_MAX of Linux
_WORD_BYTES = 32
_NETWORK = Path("/proc/self/ns/net")


class Told(NamedTuple):
    """What a rank says: a stamp, an address, and a number of what stands there and what for."""

    stamp: int
    address: int = 0
    kind: int = 0

    @property
    def check(self) -> int:
        """Return a word that belongs to the others."""
        return self.stamp ^ self.address ^ self.kind


_WORDS = len(Told(0)) + 1  # of a slot


class Board:
    """Where a rank says how far it is in each exchange under way, for others to look at.

    It stands in words that are given, or in memory of its own. Of each slot it has a stamp, which only grows, where a
    buffer stands, what for, and a word that tells that all of these belong together.
    """

    def __init__(self, num_slots: int = BOARD_SLOTS, words: Any = None) -> None:
        self._words: Any = (ctypes.c_int64 * (_WORDS * num_slots))() if words is None else words
        if words is None:
            self.keep()
        self.address = ctypes.addressof(self._words)

    def keep(self) -> None:
        """Stand for ever, as others may look late; those that have mapped it keep it themselves."""
        _boards.append(self)

    def write(self, slot: int, told: Told) -> None:
        """Say something new; the stamp last."""
        first, (stamp, *others) = _WORDS * slot, (*told, told.check)
        self._words[first + 1 : first + _WORDS] = others
        self._words[first] = stamp

    def stamp(self, slot: int) -> int:
        """Return the stamp of what was said last."""
        return int(self._words[_WORDS * slot])


_boards: list[Board] = []


@dataclass(frozen=True)
class Peers:
    """Ranks whose memory this one can read, and its own, with the ids of their processes and their boards.

    Attributes:
        processes: by rank.
        boards: their addresses, by rank.
        own: this rank's board.
        counts: of the exchanges that have begun, by number; the same on all ranks.
        under_way: those of this rank that have not ended, by slot; whoever drops one lets its slot go.
        area: of this rank, which all others have mapped; None where some cannot.
        areas: theirs, by rank.
    """

    processes: Mapping[int, int]
    boards: Mapping[int, int] = field(default_factory=dict)
    own: Board = field(default_factory=Board)
    counts: Counter[int] = field(default_factory=Counter)
    under_way: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    area: Area | None = None
    areas: Mapping[int, Mapped] = field(default_factory=dict)

    def room(self, num_bytes: int) -> Room | None:
        """Return a place in this rank's area; None where there is none."""
        return None if self.area is None else self.area.room(num_bytes)

    def part(self, rank: int, address: int, offset: int, room: Tensor) -> Tensor:
        """Return what stands behind an address that a rank has told, as much as has room: there, or else copied."""
        if is_room(address):
            return self.areas[rank].seen(address, offset, room)
        self.read(rank, address + offset, room)
        return room

    def read(self, rank: int, address: int, room: Tensor) -> None:
        """Copy bytes of a rank's memory into a dense tensor. Raises RuntimeError where that process has gone."""
        try:
            _copy(self.processes[rank], address, room.data_ptr(), room.nbytes)
        except OSError as error:
            raise RuntimeError(f"the memory of rank {rank} cannot be read: {error.strerror}") from error

    def read_all(self, rank: int, addresses: Sequence[int], rooms: Sequence[Tensor]) -> None:
        """Copy several pieces of a rank's memory into dense tensors. Raises RuntimeError as `read` does."""
        pairs = list(zip(addresses, rooms, strict=True))
        for first in range(0, len(pairs), _MOST_EXTENTS):
            batch = pairs[first : first + _MOST_EXTENTS]
            done = _copied_at_once(self.processes[rank], batch)
            for address, room in batch:  # the system may stop early; whoever has gone is named here
                if done < room.nbytes:
                    self.read(rank, address, room)
                done = max(0, done - room.nbytes)

    def look(self, rank: int, slot: int) -> Told:
        """Return what a rank has said; nothing yet while it writes.

        Raises ProcessLookupError where it has gone and what it has said with it.
        """
        if rank in self.areas:
            return _read(self.areas[rank].words[_WORDS * slot : _WORDS * (1 + slot)])
        return self._asked(rank, slot)

    def _asked(self, rank: int, slot: int) -> Told:
        """Ask the process itself. Raises ProcessLookupError where it has gone."""
        found = (ctypes.c_int64 * _WORDS)()
        size = ctypes.sizeof(found)
        _copy(self.processes[rank], self.boards[rank] + size * slot, ctypes.addressof(found), size)
        return _read(found)

    def has_come(self, rank: int, slot: int, stamp: int) -> bool:
        """Tell whether a rank has written this stamp, or a later one, or has gone."""
        try:
            return self.look(rank, slot).stamp >= stamp
        except ProcessLookupError:
            return True

    def wait_for(self, rank: int, slot: int, stamp: int, table: GroupTable, *, may_be_gone: bool = False) -> Told:
        """Wait until a rank has written this stamp, or a later one; return what it has said with it.

        Raises RuntimeError where it has gone, unless it may be, or has not come in time.
        """
        start, seconds, has_gone = perf_counter(), table.timeout.total_seconds(), False
        while True:
            try:
                told = self.look(rank, slot)
            except ProcessLookupError:
                told, has_gone = Told(0), True
            if told.stamp >= stamp:
                return told
            if has_gone and may_be_gone:
                return Told(stamp)
            if has_gone:
                raise RuntimeError(f"the process of rank {rank} has gone")
            waited = perf_counter() - start
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            if table.path is not None:
                table.path.check()
            if waited > seconds:
                raise RuntimeError(f"rank {rank} has not come within {seconds:g} s")
            sleep(min(waited * SLEEP_SHARE, MOST_SLEEP_SECONDS))
            has_gone = self._has_gone(rank, slot)  # it may have come before: that is looked at first

    def _has_gone(self, rank: int, slot: int) -> bool:
        try:
            self._asked(rank, slot)
        except ProcessLookupError:
            return True
        except OSError:  # it has left these ranks, and keeps its board no longer
            return False
        return False


def _read(words: Any) -> Told:
    """Return what stands in a slot's words, if they belong together."""
    *given, check = words
    told = Told(*given)
    return told if check == told.check else Told(0)


def _copy(process: int, address: int, place: int, size: int) -> None:
    """Copy bytes of a process's memory to this one's; goes on where the system stopped early."""
    while size > 0:
        there, here = _Extent(address, size), _Extent(place, size)
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        count = int(system_call()(process, ctypes.byref(here), one, ctypes.byref(there), one, none))
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number) if count else "nothing was read")
        address, place, size = address + count, place + count, size - count


def _copied_at_once(process: int, pieces: Sequence[tuple[int, Tensor]]) -> int:
    """Copy pieces of a process's memory in one call; return how many bytes that has brought."""
    there, here = (_Extent * len(pieces))(), (_Extent * len(pieces))()
    for number, (address, room) in enumerate(pieces):
        there[number].first, here[number].first = address, room.data_ptr()
        there[number].size = here[number].size = room.nbytes
    count = ctypes.c_ulong(len(pieces))
    return max(0, int(system_call()(process, here, count, there, count, ctypes.c_ulong(0))))


class _Extent(ctypes.Structure):
    """A system's `iovec`."""

    _fields_ = (("first", ctypes.c_void_p), ("size", ctypes.c_size_t))


@cache
def system_call() -> Any:
    """Find the system's call. Raises AttributeError where it has none."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    return call


_found: WeakKeyDictionary[GroupTable, dict[tuple[int, ...], Peers | None]] = WeakKeyDictionary()


def peers_of(table: GroupTable, ranks: Sequence[int]) -> Peers | None:
    """Return the processes of some ranks if all of them can read each other's memory.

    The first call for them is collective over them.
    """
    key, known = tuple(ranks), _found.setdefault(table, {})
    if key not in known:
        known[key] = _tried(table, key) if table.is_of_processes else None
    return known[key]


def peers_worth_reading(num_bytes: int, ranks: Sequence[int], table: GroupTable, *, on_host: bool) -> Peers | None:
    """Return the ranks' processes if they can read each other's memory, and so many bytes are worth it.

    The first call for some ranks that are worth it is collective over them.
    """
    return peers_of(table, ranks) if on_host and num_bytes >= LEAST_BYTES and len(ranks) > 1 else None


def _tried(table: GroupTable, ranks: tuple[int, ...]) -> Peers | None:
    """Return the processes of ranks all of which can read each other."""
    own = area()
    peers = mutual_peers(table, ranks, words=None if own is None else own.mapped.words)
    told = _told(table, ranks, (len(peers.processes) == len(ranks), own and own.file))
    if not all(can_read for can_read, _ in told):
        return None
    return _with_areas(peers, own, [file for _, file in told], table, ranks)


def _with_areas(
    peers: Peers, own: Area | None, files: Sequence[int | None], table: GroupTable, ranks: tuple[int, ...]
) -> Peers:
    """Return peers with what they share, if all can map it; `files` are in the order of the group."""
    pairs = zip(sorted(ranks, key=table.to_global), files, strict=True)
    given = {rank: (peers.processes[rank], file) for rank, file in pairs if file is not None and rank != table.rank}
    found = mapped_areas(given)
    can_map = all(_told(table, ranks, own is not None and len(found) == len(ranks) - 1))
    if own is not None:
        own.close()
    if not can_map:
        peers.own.keep()
        return peers
    return replace(peers, area=own, areas=found)


def mutual_peers(table: GroupTable, ranks: tuple[int, ...], num_slots: int = BOARD_SLOTS, words: Any = None) -> Peers:
    """Return those of some ranks, this one among them, that it can read and that can read it; collective over them.

    A word that nobody can guess is read from each. This rank's board stands in `words`, if they are given.
    """
    word = bytearray(os.urandom(_WORD_BYTES))
    place = ctypes.addressof(ctypes.c_char.from_buffer(word))
    board, order = Board(num_slots, words), sorted(ranks, key=table.to_global)
    told = _told(table, ranks, (os.getpid(), board.address, place, bytes(word), _network()))
    read = {
        rank
        for rank, (process, _, at, found, network) in zip(order, told, strict=True)
        if network == _network() and _word_at(process, at) == found
    }
    readers = {rank for rank, others in zip(order, _told(table, ranks, read), strict=True) if table.rank in others}
    known = {rank: one for rank, one in zip(order, told, strict=True) if rank in read & readers}
    processes, boards = ({rank: one[part] for rank, one in known.items()} for part in (0, 1))
    return Peers(processes, boards, board)


def _told(table: GroupTable, ranks: tuple[int, ...], value: Any) -> list[Any]:
    """Return what all ranks say, in the order of their group."""
    values = [value] * len(ranks)
    with guarded("agreement on what memory can be read", ranks, table):
        table.transport.of_all(values, value, table.group(ranks))
    return values


def _network() -> int:
    return _NETWORK.stat().st_ino if _NETWORK.exists() else 0


def _word_at(process: int, address: int) -> bytes | None:
    """Read a word; None where that process's memory cannot be read, or this system has no way to."""
    found = bytearray(_WORD_BYTES)
    try:
        _copy(process, address, ctypes.addressof(ctypes.c_char.from_buffer(found)), _WORD_BYTES)
    except (OSError, AttributeError):
        return None
    return bytes(found)
