"""Collectives of ranks that can read each other's memory: only where it stands is sent, and that it has been read.

A message over a loopback connection is copied twice by the system, piece by piece, by threads that wait for each other.
Linux also copies from one process to another in one go (`process_vm_readv`, known as cross-memory attach from MPI
libraries and UCX) where the reader might trace the other: same user, same namespace of processes, nothing that forbids
it. Whether ranks can is found by trying, once per group of them; those of other network namespaces count as of another
machine. Measured on two processes of one core each, 12.4 MB of float32, milliseconds: all-reduce 12.6 by gloo, 1.7 so.

Every exchange is a few rounds in which each rank tells each other one number. In between ranks read and sum, each its
own segment, in the order of the ranks: sums have the same bits as those of `collectives`. All of it is done in `wait`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.collectives import Exchange, segments, sum_into
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Posted, Tag, post

LEAST_BYTES = 1 << 18
"""Smaller messages are sent: two rounds of numbers take as long."""

CHUNK_BYTES = 1 << 20
"""What is summed is read in chunks that stay in a core's cache."""

_WORD_BYTES = 32
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Peers:
    """Ranks whose memory this one can read, and its own: the ids of their processes."""

    processes: Mapping[int, int]

    def read(self, rank: int, address: int, room: Tensor) -> None:
        """Copy bytes of a rank's memory into a dense tensor. Raises RuntimeError where that process has gone."""
        try:
            _copy(self.processes[rank], address, room.data_ptr(), room.nbytes)
        except OSError as error:
            raise RuntimeError(f"the memory of rank {rank} cannot be read: {error.strerror}") from error


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
    """Read a word that nobody can guess from every rank."""
    word = bytearray(os.urandom(_WORD_BYTES))
    place = ctypes.addressof(ctypes.c_char.from_buffer(word))
    told = _told(table, ranks, (os.getpid(), place, bytes(word), _network()))
    able = all(network == _network() and _word_at(process, at) == found for process, at, found, network in told)
    if not all(_told(table, ranks, able)):
        return None
    order = sorted(ranks, key=table.to_global)
    return Peers({rank: process for rank, (process, *_) in zip(order, told, strict=True)})


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


class _Reading:
    """An exchange under way: `wait` does it, once all have said where their buffers are."""

    def __init__(
        self,
        act: Callable[[_Reading, Addresses], None],
        buffer: Tensor,
        ranks: Sequence[int],
        tag: int,
        table: GroupTable,
    ) -> None:
        self.buffer, self.ranks, self.table = buffer, ranks, table
        self._tag, self._act = tag, act
        self._others = [rank for rank in ranks if rank != table.rank]
        self._first = self._say(buffer.data_ptr())

    def wait(self) -> None:
        """Read what the others have, and stay until they have read this rank's."""
        self._act(self, self._hear(self._first))
        self.meet()

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block: nobody knows."""
        return False

    def meet(self) -> None:
        """Wait until all others are here."""
        self._hear(self._say(0))

    def _say(self, number: int) -> tuple[Posted, list[Tensor]]:
        rooms = [torch.zeros(1, dtype=torch.int64) for _ in self._others]
        word = torch.tensor([number])
        receives = [(rank, room, self._tag) for rank, room in zip(self._others, rooms, strict=True)]
        sends = [(rank, word, self._tag) for rank in self._others]
        return post(receives, sends, self.table, self.table.group(self.ranks)), rooms

    def _hear(self, said: tuple[Posted, list[Tensor]]) -> Addresses:
        posted, rooms = said
        posted.wait()
        return {rank: int(room) for rank, room in zip(self._others, rooms, strict=True)}


Act = Callable[..., None]


def start_here(
    act: Act, buffer: Tensor, sizes: Sequence[int], ranks: Sequence[int], number: int, table: GroupTable, peers: Peers
) -> Exchange:
    """Start one of the exchanges below, of a flat buffer of `segments`. Collective over `ranks`.

    Exchanges of different numbers may be under way together; all ranks wait for theirs in one order.
    """
    acting = partial(act, sizes=sizes, peers=peers)
    return Exchange(tuple(ranks), [_Reading(acting, buffer, ranks, Tag.PEERS + number, table)])


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

    _read_now(act, own, ranks, table, "all-reduce")
    return result


def gather_read(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable, peers: Peers
) -> list[Tensor]:
    """Do what `collectives.gather_parts` does."""
    own = x.detach().contiguous()
    parts = [own if r == table.rank else own.new_empty(list(s)) for r, s in zip(ranks, shapes, strict=True)]

    def act(reading: _Reading, addresses: Addresses) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            if rank != table.rank and part.numel():
                peers.read(rank, addresses[rank], part)

    _read_now(act, own, ranks, table, "all-gather")
    return parts


def reduce_read(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, peers: Peers) -> Tensor:
    """Do what `collectives.reduce_parts` does."""
    here, sizes = table.position(ranks), [part.numel() for part in parts]
    buffer = torch.cat([part.detach().reshape(-1) for part in parts])
    own, offset = segments(buffer, sizes)[here], _offsets(sizes)[here] * buffer.itemsize
    result = torch.empty_like(parts[here], memory_format=torch.contiguous_format)

    def act(reading: _Reading, addresses: Addresses) -> None:
        _sum_into(result.view(-1), own, addresses, offset, table.rank, peers)

    _read_now(act, buffer, ranks, table, "reduce-scatter")
    return result


def _read_now(
    act: Callable[[_Reading, Addresses], None], own: Tensor, ranks: Sequence[int], table: GroupTable, what: str
) -> None:
    with guarded(what, ranks, table):
        _Reading(act, own, ranks, Tag.PEERS_NOW, table).wait()
