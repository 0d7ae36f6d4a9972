"""Collectives of ranks that can read each other's memory: nothing is sent.

A message over a loopback connection is copied twice by the system, piece by piece, by threads that wait for each other.
Linux also copies from one process to another in one go (`process_vm_readv`, known as cross-memory attach from MPI
libraries and UCX) where the reader might trace the other: same user, same namespace of processes, nothing that forbids
it. Whether ranks can is found by trying, once per group of them; those of other network namespaces count as of another
machine. Measured on two processes of one core each, milliseconds by messages and so: the sum of a bucket of 12.4 MB 6.4
and 2.3, an all-reduce of 2 MB in an op 2.6 and 0.4, of 64 KB 0.23 and 0.12.

Every rank has a board, on which it writes where its buffer stands, and how far it is; the others look there. In between
ranks read and sum, each its own segment, in the order of the ranks: sums have the same bits as those of `collectives`.
All of it is done in `wait`.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.collectives import Exchange, segments, sum_into
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.small_sums import refuse_unlike
from hetu_fx.errors import CommError

LEAST_BYTES = 1 << 14
"""Smaller messages are sent."""

CHUNK_BYTES = 1 << 20
"""What is summed is read in chunks that stay in a core's cache."""

BOARD_SLOTS = 1 << 12
"""So many exchanges may be under way together."""

SPIN_SECONDS, SLEEP_SHARE, MOST_SLEEP_SECONDS = 2e-4, 0.02, 1e-3
"""For how long a rank that waits looks again and again; it then sleeps a share of the time so far, up to a bound."""

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


_WORDS = len(Told._fields) + 1  # of a slot


class Board:
    """Where a rank says how far it is in each exchange under way, for others to look at.

    Of each slot it has a stamp, which only grows, where a buffer stands, what for, and a word that tells that all of
    these belong together.
    """

    def __init__(self, num_slots: int = BOARD_SLOTS) -> None:
        self._words: Any = (ctypes.c_int64 * (_WORDS * num_slots))()
        _boards.append(self)  # for ever: others may look late
        self.address = ctypes.addressof(self._words)

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
        counts: of the exchanges that have begun, by slot; the same on all ranks.
    """

    processes: Mapping[int, int]
    boards: Mapping[int, int] = field(default_factory=dict)
    own: Board = field(default_factory=Board)
    counts: Counter[int] = field(default_factory=Counter)

    def read(self, rank: int, address: int, room: Tensor) -> None:
        """Copy bytes of a rank's memory into a dense tensor. Raises RuntimeError where that process has gone."""
        try:
            _copy(self.processes[rank], address, room.data_ptr(), room.nbytes)
        except OSError as error:
            raise RuntimeError(f"the memory of rank {rank} cannot be read: {error.strerror}") from error

    def look(self, rank: int, slot: int) -> Told:
        """Return what a rank has said; nothing yet while it writes. Raises ProcessLookupError where it has gone."""
        found = (ctypes.c_int64 * _WORDS)()
        size = ctypes.sizeof(found)
        _copy(self.processes[rank], self.boards[rank] + size * slot, ctypes.addressof(found), size)
        *words, check = found
        told = Told(*words)
        return told if check == told.check else Told(0)

    def wait_for(self, rank: int, slot: int, stamp: int, table: GroupTable, *, may_be_gone: bool = False) -> Told:
        """Wait until a rank has written this stamp, or a later one; return what it has said with it.

        Raises RuntimeError where it has gone, unless it may be, or has not come in time.
        """
        start, seconds = perf_counter(), table.timeout.total_seconds()
        while True:
            try:
                told = self.look(rank, slot)
            except ProcessLookupError as error:
                if may_be_gone:
                    return Told(stamp)
                raise RuntimeError(f"the process of rank {rank} has gone") from error
            if told.stamp >= stamp:
                return told
            waited = perf_counter() - start
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            if table.path is not None:
                table.path.check()
            if waited > seconds:
                raise RuntimeError(f"rank {rank} has not come within {seconds:g} s")
            sleep(min(waited * SLEEP_SHARE, MOST_SLEEP_SECONDS))


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
    peers = mutual_peers(table, ranks)
    return peers if all(_told(table, ranks, len(peers.processes) == len(ranks))) else None


def mutual_peers(table: GroupTable, ranks: tuple[int, ...], num_slots: int = BOARD_SLOTS) -> Peers:
    """Return those of some ranks, this one among them, that it can read and that can read it; collective over them.

    A word that nobody can guess is read from each.
    """
    word = bytearray(os.urandom(_WORD_BYTES))
    place = ctypes.addressof(ctypes.c_char.from_buffer(word))
    board, order = Board(num_slots), sorted(ranks, key=table.to_global)
    told = _told(table, ranks, (os.getpid(), board.address, place, bytes(word), _network()))
    seen = {
        rank
        for rank, (process, _, at, found, network) in zip(order, told, strict=True)
        if network == _network() and _word_at(process, at) == found
    }
    readers = {rank for rank, others in zip(order, _told(table, ranks, seen), strict=True) if table.rank in others}
    known = {rank: one for rank, one in zip(order, told, strict=True) if rank in seen & readers}
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


Addresses = Mapping[int, int]
"""Of the other ranks' buffers."""


class _Phase(IntEnum):
    """How far a rank is in an exchange."""

    STANDS = 1  # its buffer stands where it says
    SUMMED = 2  # what it sums is there
    READ = 3  # it reads nothing any more


class _Reading:
    """An exchange under way: `wait` does it, once all have said where their buffers are.

    Args:
        act: reads, given where the others' are.
        buffer: this rank's.
        ranks: all.
        slot: of the board.
        peers: the ranks' processes.
        table: the ranks.
        what: it is, the same on all: its kind, sizes and dtype.
    """

    def __init__(
        self,
        act: Callable[[_Reading, Addresses], None],
        buffer: Tensor,
        ranks: Sequence[int],
        slot: int,
        peers: Peers,
        table: GroupTable,
        what: str,
    ) -> None:
        self.buffer, self.ranks, self.table, self.peers = buffer, ranks, table, peers
        self._act, self._slot, self._what, self._kind = act, slot, what, crc32(what.encode())
        self._others = [rank for rank in ranks if rank != table.rank]
        peers.counts[slot] += 1
        self._stamp = peers.counts[slot] * len(_Phase)
        self._say(_Phase.STANDS)

    def wait(self) -> None:
        """Read what the others have, and stay until they have read this rank's.

        Raises DivergedError where another rank has come with something else.
        """
        told = self._all_are(_Phase.STANDS)
        if any(other.kind != self._kind for other in told.values()):
            refuse_unlike(self.table, self._what)
        self._act(self, {rank: other.address for rank, other in told.items()})
        self._say(_Phase.READ)
        self._all_are(_Phase.READ)

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block: nobody knows."""
        return False

    def meet(self) -> None:
        """Say that this rank has its sum, and wait until all others have theirs."""
        self._say(_Phase.SUMMED)
        self._all_are(_Phase.SUMMED)

    def _say(self, phase: _Phase) -> None:
        self.peers.own.write(self._slot, Told(self._stamp + phase, self.buffer.data_ptr(), self._kind))

    def _all_are(self, phase: _Phase) -> dict[int, Told]:
        """Wait until all others are so far; return what they have said. Who is gone reads nothing."""
        stamp, gone = self._stamp + phase, phase is _Phase.READ
        waiting = partial(self.peers.wait_for, slot=self._slot, stamp=stamp, table=self.table, may_be_gone=gone)
        return {rank: waiting(rank) for rank in self._others}


Act = Callable[..., None]


def start_here(
    act: Act, buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], number: int, table: GroupTable, peers: Peers
) -> Exchange:
    """Start one of the exchanges below, of a flat buffer of `segments`. Collective over `ranks`.

    Exchanges of different numbers may be under way together; all ranks wait for theirs in one order.
    """
    if number >= BOARD_SLOTS - 1:
        raise CommError(
            f"exchange {number} of ranks {list(ranks)} is one of more than {BOARD_SLOTS - 1}; use fewer buckets"
        )
    what = f"{act.__name__} of {list(sizes)} {buffer.dtype}"
    acting = partial(act, sizes=sizes, peers=peers)
    return Exchange(tuple(ranks), [_Reading(acting, buffer, ranks, 1 + number, peers, table, what)])


def sum_all_here(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.sum_all` does: each rank sums a part, and reads the others' sums."""
    parts = even_sizes(sum(sizes), len(reading.ranks))
    sum_segments_here(reading, addresses, parts, peers)
    reading.meet()
    gather_segments_here(reading, addresses, parts, peers)


def gather_segments_here(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.gather_segments` does."""
    for rank, part, offset in zip(reading.ranks, segments(reading.buffer, sizes), _offsets(sizes), strict=True):
        if rank != reading.table.rank:
            peers.read(rank, addresses[rank] + offset * part.itemsize, part)


def sum_segments_here(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.sum_segments` does."""
    here = reading.table.position(reading.ranks)
    own, offset = segments(reading.buffer, sizes)[here], _offsets(sizes)[here] * reading.buffer.itemsize
    _sum_into(own, own, addresses, offset, reading.table.rank, peers)


def _sum_into(result: Tensor, own: Tensor, addresses: Addresses, offset: int, here: int, peers: Peers) -> None:
    """Sum this rank's flat tensor with those of the others, `offset` bytes into their buffers, in the order of ranks.

    `result` may be this rank's own.
    """
    most = max(1, CHUNK_BYTES // own.itemsize // len(addresses))
    rooms = {rank: own.new_empty(min(most, own.numel())) for rank in addresses}
    for start in range(0, own.numel(), most):
        mine, place = own[start : start + most], offset + start * own.itemsize
        parts = {rank: room[: mine.numel()] for rank, room in rooms.items()}
        for rank, part in parts.items():
            peers.read(rank, addresses[rank] + place, part)
        parts[here] = mine
        into = mine if result is own else result[start : start + most]
        sum_into(into, [parts[rank] for rank in sorted(parts)])


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]


def sum_read(x: Tensor, ranks: Sequence[int], table: GroupTable, peers: Peers) -> Tensor:
    """Do what `collectives.sum_over` does: every rank reads all of the others' tensors, which stay as they are."""
    own = x.detach().contiguous()
    result = torch.empty_like(own)

    def act(reading: _Reading, addresses: Addresses) -> None:
        _sum_into(result.view(-1), own.view(-1), addresses, 0, table.rank, peers)

    _read_now(act, own, ranks, peers, table, "all-reduce", list(own.shape))
    return result


def gather_read(
    x: Tensor,
    shapes: Sequence[Sequence[int]],
    ranks: Sequence[int],
    table: GroupTable,
    peers: Peers,
    what: str = "all-gather",
) -> list[Tensor]:
    """Do what `collectives.gather_parts` does; `what` it is, for messages."""
    own = x.detach().contiguous()
    parts = [own if r == table.rank else own.new_empty(list(s)) for r, s in zip(ranks, shapes, strict=True)]

    def act(reading: _Reading, addresses: Addresses) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            if rank != table.rank and part.numel():
                peers.read(rank, addresses[rank], part)

    _read_now(act, own, ranks, peers, table, what, [list(shape) for shape in shapes])
    return parts


def reduce_read(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, peers: Peers) -> Tensor:
    """Do what `collectives.reduce_parts` does."""
    here, sizes = table.position(ranks), [part.numel() for part in parts]
    buffer = torch.cat([part.detach().reshape(-1) for part in parts])
    own, offset = segments(buffer, sizes)[here], _offsets(sizes)[here] * buffer.itemsize
    result = torch.empty_like(parts[here], memory_format=torch.contiguous_format)

    def act(reading: _Reading, addresses: Addresses) -> None:
        _sum_into(result.view(-1), own, addresses, offset, table.rank, peers)

    _read_now(act, buffer, ranks, peers, table, "reduce-scatter", sizes)
    return result


def _read_now(
    act: Callable[[_Reading, Addresses], None],
    own: Tensor,
    ranks: Sequence[int],
    peers: Peers,
    table: GroupTable,
    what: str,
    sizes: object,
) -> None:
    with guarded(what, ranks, table):
        _Reading(act, own, ranks, 0, peers, table, f"{what} of {sizes} {own.dtype}").wait()
