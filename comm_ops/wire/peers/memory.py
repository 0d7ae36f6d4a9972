"""Ranks that can read each other's memory: who they are, what they say, and how they wait for each other.

A message over a loopback connection is copied twice by the system, piece by piece, by threads that wait for each other.
Linux also copies from one process to another in one go (`system`). Whether ranks can is found by trying, once per group
of them; those of other network namespaces count as of another machine.

Every rank has a board, on which it writes where its buffers stand, and how far it is; the others have mapped it, and
look there. So do they what is made for them to read (`rooms`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from hetu_fx.base.machine import network_name
from hetu_fx.base.per_rank import own
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.objects.messages import gather
from hetu_fx.comm_ops.wire.peers.rooms import SharedBuffer, SharedPool, area_bytes, behind, is_room, view_remote
from hetu_fx.comm_ops.wire.peers.system import (
    WORD_BYTES,
    SharedMemory,
    SharedPlace,
    copy,
    copy_extents,
    map_remote_memory,
    shared_memory,
    word_at,
)
from hetu_fx.comm_ops.wire.shutdown import release_at_exit

Found = TypeVar("Found")

LEAST_BYTES = 1 << 12
"""Smaller messages are sent."""

BOARD_SLOTS = 1 << 16
"""Of a board: 2 MB."""

SPIN_SECONDS, SLEEP_SHARE, MOST_SLEEP_SECONDS = 2e-4, 0.02, 1e-3
"""For how long a rank that waits looks again and again; it then sleeps a share of the time so far, up to a bound."""


class Record(NamedTuple):
    """What a rank says: a stamp, an address, and a number of what stands there and what for."""

    stamp: int
    address: int = 0
    kind: int = 0

    @property
    def check(self) -> int:
        """Return a word that belongs to the others."""
        return self.stamp ^ self.address ^ self.kind


_WORDS = len(Record(0)) + 1  # of a slot


_SLOT = struct.Struct(f"{_WORDS}q")
SLOT_BYTES = _SLOT.size
_OTHERS = struct.Struct(f"{_WORDS - 1}q")
_STAMP = struct.Struct("q")


class SharedMailbox:
    """Where a rank says how far it is in each exchange under way, for others to look at.

    Of each slot it has a stamp, which only grows, where a buffer stands, what for, and a word that tells that all of
    these belong together. `memory` is shared: this rank's own is written to, those of others are looked at.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory

    def write(self, slot: int, told: Record) -> None:
        """Say something new; the stamp last."""
        first = _SLOT.size * slot
        _OTHERS.pack_into(self.memory, first + _STAMP.size, told.address, told.kind, told.check)
        _STAMP.pack_into(self.memory, first, told.stamp)

    def stamp(self, slot: int) -> int:
        """Return the stamp of what was said last."""
        return int(_STAMP.unpack_from(self.memory, _SLOT.size * slot)[0])

    def look(self, slot: int) -> Record:
        """Return what was said last; nothing yet while it is written."""
        stamp, address, kind, check = _SLOT.unpack_from(self.memory, _SLOT.size * slot)
        return Record(stamp, address, kind) if check == stamp ^ address ^ kind else _NOTHING


_NOTHING = Record(0)


@dataclass(frozen=True)
class Peers:
    """Ranks whose memory this one can read, and its own, with the ids of their processes and their boards.

    Attributes:
        processes: by rank.
        words: addresses of a word of theirs, and the word, by rank: who does not have it there any more has gone.
        boards: theirs, by rank.
        own: this rank's board.
        counts: of the exchanges that have begun, by number; the same on all ranks.
        under_way: those of this rank that have not ended, by slot; whoever drops one lets its slot go.
        standing: the exchange of this rank whose buffer others may still be reading; see `let_stand`.
        area: of this rank, which all others have mapped, if there is one.
        areas: theirs, by rank.
    """

    processes: Mapping[int, int]
    words: Mapping[int, tuple[int, bytes]]
    boards: Mapping[int, SharedMailbox]
    own: SharedMailbox
    counts: Counter[int] = field(default_factory=Counter)
    under_way: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    standing: list[Any] = field(default_factory=list)
    area: SharedPool | None = None
    areas: Mapping[int, Tensor] = field(default_factory=dict)

    def room(self, num_bytes: int) -> SharedBuffer | None:
        """Return a place in this rank's area; None where there is none."""
        return None if self.area is None else self.area.room(num_bytes)

    def part(self, rank: int, address: int, offset: int, room: Flat) -> Tensor:
        """Return what stands behind an address that a rank has told, as much as has room: there, or else copied."""
        if is_room(address):
            return view_remote(self.areas[rank], address, offset, room.tensor)
        self.read(rank, address + offset, room)
        return room.tensor

    def read(self, rank: int, address: int, room: Flat) -> None:
        """Copy bytes of a rank's memory into a buffer. Raises RuntimeError where that process has gone."""
        try:
            copy(self.processes[rank], address, room.tensor.data_ptr(), room.tensor.nbytes)
        except OSError as error:
            raise _unreadable(rank, error) from error

    def read_all(self, rank: int, addresses: Sequence[int], rooms: Sequence[Flat]) -> None:
        """Copy several pieces of a rank's memory into buffers. Raises RuntimeError as `read` does."""
        sizes = [room.tensor.nbytes for room in rooms]
        places = [room.tensor.data_ptr() for room in rooms]
        taken, placed = (np.array([starts, sizes], dtype=np.int64).T for starts in (addresses, places))
        try:
            copy_extents(self.processes[rank], taken, placed)
        except OSError as error:
            raise _unreadable(rank, error) from error

    def look(self, rank: int, slot: int) -> Record:
        """Return what a rank has said, also one that has gone since."""
        return self.boards[rank].look(slot)

    def wait_for(self, rank: int, slot: int, stamp: int, table: GroupTable, *, may_be_gone: bool = False) -> Record:
        """Wait until a rank has written this stamp, or a later one; return what it has said with it.

        Raises RuntimeError where it has gone, unless it may be, or has not come in time.
        """
        board = self.boards[rank]

        def told_by_now() -> Record | None:
            told = board.look(slot)
            return told if told.stamp >= stamp else None

        return self.until(told_by_now, rank, table, Record(stamp) if may_be_gone else None)

    def let_stand(self, exchange: Any) -> None:
        """Keep an exchange that this rank has read all of, and its buffer, until the next one; nobody writes to that.

        Whoever comes late, as to a sum that was begun before other work, would else be waited for twice. As all take
        theirs in one order, it is the one before that is waited for. Its buffer is in memory that the others have
        mapped, which outlives this process.
        """
        before, self.standing[:] = list(self.standing), [exchange]
        for one in before:
            one.end()

    def until(
        self, find: Callable[[], Found | None], rank: int, table: GroupTable, if_gone: Found | None = None
    ) -> Found:
        """Look for what a rank is to bring, again and again, and return it once it is there.

        `if_gone`, if the rank has gone without. Raises RuntimeError for one that has gone where nothing is given for
        it, or that has not come in time, DivergedError where it is elsewhere.
        """
        start, seconds, check_at = perf_counter(), table.timeout.total_seconds(), SPIN_SECONDS
        while (found := find()) is None:
            waited = perf_counter() - start
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            if waited >= check_at:  # not at each of the many short sleeps: it costs as much as they do
                check_at = waited + MOST_SLEEP_SECONDS
                if not self.lives(rank):
                    found = find() or if_gone  # it may have said it, and then gone
                    if found is None:
                        raise _gone(rank)
                    return found
                if table.path is not None:
                    table.path.check()
                if waited > seconds:
                    raise RuntimeError(f"rank {rank} has not come within {seconds:g} s")
            sleep(min(waited * SLEEP_SHARE, MOST_SLEEP_SECONDS))
        return found

    def lives(self, rank: int) -> bool:
        """Tell whether a rank still takes part: its process is there, and has not left the world."""
        address, word = self.words[rank]
        return word_at(self.processes[rank], address) == word


def _unreadable(rank: int, error: OSError) -> RuntimeError:
    if isinstance(error, ProcessLookupError):
        return _gone(rank)
    return RuntimeError(f"the memory of rank {rank} cannot be read: {error.strerror}")


def _gone(rank: int) -> RuntimeError:
    return RuntimeError(f"the process of rank {rank} has gone")


def find_peers(table: GroupTable, ranks: Sequence[int]) -> Peers | None:
    """Return the processes of some ranks if all of them can read each other's memory.

    The first call for them is collective over them.
    """
    key = tuple(ranks)
    if key not in table.found_out:
        table.found_out[key] = _tried(table, key) if table.is_of_processes else None
    found: Peers | None = table.found_out[key]
    return found


def peers_worth_reading(num_bytes: int, ranks: Sequence[int], table: GroupTable, *, on_host: bool) -> Peers | None:
    """Return the ranks' processes if they can read each other's memory, and so many bytes are worth it.

    The first call for some ranks that are worth it is collective over them.
    """
    return find_peers(table, ranks) if on_host and num_bytes >= LEAST_BYTES and len(ranks) > 1 else None


def _tried(table: GroupTable, ranks: tuple[int, ...]) -> Peers | None:
    """Return the processes of ranks all of which can read each other."""
    peers = mutual_peers(table, ranks, room_bytes=area_bytes())
    return peers if all_are_peers(peers, table, ranks) else None


def all_are_peers(peers: Peers, table: GroupTable, ranks: tuple[int, ...]) -> bool:
    """Tell whether all of some ranks have found each other; collective over them."""
    return all(_told_by_all(table, ranks, len(peers.processes) == len(ranks)))


def mutual_peers(table: GroupTable, ranks: tuple[int, ...], num_slots: int = BOARD_SLOTS, room_bytes: int = 0) -> Peers:
    """Return those of some ranks, this one among them, that it can read and that can read it; collective over them.

    A word that nobody can guess is read from each. What this rank shares is a board of so many slots, and its area.
    """
    board_bytes = _SLOT.size * num_slots
    shared, order = shared_memory(board_bytes + room_bytes), sorted(ranks, key=table.to_global)
    told = dict(zip(order, _told_by_all(table, ranks, _Introduction.own(shared)), strict=True))
    found = {rank: memory for rank, one in told.items() if (memory := one.seen()) is not None}
    seen_by = dict(zip(order, _told_by_all(table, ranks, set(found)), strict=True))
    if shared is None:
        return Peers({}, {}, {}, SharedMailbox(mmap.mmap(-1, 1)))
    shared.close()
    known = [rank for rank in found if table.rank in seen_by[rank]]
    processes = {rank: told[rank].process for rank in known}
    words = {rank: (told[rank].address, told[rank].word) for rank in known}
    boards = {rank: SharedMailbox(found[rank]) for rank in known}
    areas = {rank: behind(found[rank], board_bytes) for rank in known} if room_bytes else {}
    area = SharedPool(behind(shared.memory, board_bytes)[:room_bytes]) if room_bytes else None
    return Peers(processes, words, boards, SharedMailbox(shared.memory), area=area, areas=areas)


class _Introduction(NamedTuple):
    """What a process tells of itself: its number, where a word stands, the word, what it shares, and its network."""

    process: int
    address: int
    word: bytes
    shared: SharedPlace | None
    network: str

    @classmethod
    def own(cls, shared: SharedMemory | None) -> _Introduction:
        """Introduce this process."""
        own_word = own(_OwnWord)
        release_at_exit(own_word)
        place = None if shared is None else shared.place
        return cls(os.getpid(), ctypes.addressof(own_word.word), bytes(own_word.word), place, network_name())

    def seen(self) -> mmap.mmap | None:
        """Return what the process shares, if its memory can be read."""
        if self.network != network_name() or self.shared is None or word_at(self.process, self.address) != self.word:
            return None
        return map_remote_memory(self.process, self.shared, for_tensors=True)


class _OwnWord:
    """A word of this process that nobody can guess, another one in each world that it joins.

    Others look for it: it goes with the process, or when that leaves the world and lives on (`hetu-fx launch`).
    """

    def __init__(self) -> None:
        self.word = (ctypes.c_char * WORD_BYTES).from_buffer(bytearray(os.urandom(WORD_BYTES)))

    def release(self) -> None:
        """Take part no longer, as far as others can see."""
        self.word.raw = os.urandom(WORD_BYTES)


def _told_by_all(table: GroupTable, ranks: tuple[int, ...], value: Any) -> list[Any]:
    """Return what all ranks say, in the order of their group."""
    order = sorted(ranks, key=table.to_global)
    return gather(value, table, table.group(ranks), order, "agreement on what memory can be read")
