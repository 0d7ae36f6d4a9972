"""Collectives of ranks that read each other's memory: each says where its tensor stands, and nothing is sent.

In between ranks read and sum, each its own segment, in the order of the ranks: sums have the same bits as those of
`collectives`. All of it is done in `wait`. Measured on two processes of one core each, milliseconds by messages and so:
the sum of a bucket of 12.4 MB 6.4 and 2.3, an all-reduce of 2 MB in an op 2.6 and 0.4, of 64 KB 0.23 and 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.collectives import Exchange, PendingWork, sum_in_order
from hetu_fx.comm_ops.wire.flat import Flat, dense, is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.peers.memory import BOARD_SLOTS, Peers, Record
from hetu_fx.comm_ops.wire.peers.rooms import SharedBuffer, is_room
from hetu_fx.comm_ops.wire.peers.standing import Standing
from hetu_fx.comm_ops.wire.small_sums import refuse_unlike
from hetu_fx.errors import CommError

AT_ONCE = 32
"""So many exchanges of one number may be under way: a step's parts under several variants, for example."""

CHUNK_BYTES = 1 << 20
"""What is summed is read in chunks that stay in a core's cache."""

Addresses = Mapping[int, int]
"""Of the other ranks' buffers."""

_standing = Standing()


class Summand(NamedTuple):
    """A tensor to be summed, dense, and the room in which it stands, if it does."""

    value: Tensor
    room: SharedBuffer | None = None


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
        number: of it; those of one number begin in one order on all ranks, and so they end.
        peers: the ranks' processes.
        table: the ranks.
        what: it is, the same on all: its kind, sizes and dtype.
        room: in which the buffer stands, if it does. There it stays, so that `wait` need not wait until it is read.
    """

    def __init__(
        self,
        act: Callable[[_Reading, Addresses], None],
        buffer: Flat,
        ranks: Sequence[int],
        number: int,
        peers: Peers,
        table: GroupTable,
        what: str,
        *,
        room: SharedBuffer | None = None,
    ) -> None:
        self.buffer, self.ranks, self.table, self.peers, self._room = buffer, ranks, table, peers, room
        self._act: Callable[[_Reading, Addresses], None] | None = act
        self._what, self._kind = what, crc32(what.encode())
        self._others = [rank for rank in ranks if rank != table.rank]
        peers.counts[number] += 1
        count = peers.counts[number]
        self._slot, self._stamp = _slot_of(number, count, ranks), count * len(_Phase)
        before = peers.under_way.get(self._slot)
        if before is not None and before._act is None:  # it stands on: no other that stands has come since
            before.end()
        elif before is not None:
            raise CommError(
                f"more than {AT_ONCE} exchanges {number} of ranks {list(ranks)} are under way; end one before the next"
            )
        peers.under_way[self._slot] = self
        self._say(_Phase.STANDS)

    def wait(self) -> None:
        """Read what the others have, and stay until they have read this rank's, unless it has a room.

        Raises DivergedError where another rank has come with something else.
        """
        told = self._all_are(_Phase.STANDS)
        if any(other.kind != self._kind for other in told.values()):
            refuse_unlike(self.table, self._what)
        act, self._act = self._act, None  # and what it has made, which another may take
        assert act is not None, "waited for once"
        act(self, {rank: other.address for rank, other in told.items()})
        self._say(_Phase.READ)
        if self._room is None:
            self.end()
        else:
            _standing.add(id(self.peers), self)

    def end(self) -> None:
        """Stay until the others have read this rank's buffer; who has gone reads nothing."""
        self._all_are(_Phase.READ)
        if self.peers.under_way.get(self._slot) is self:
            del self.peers.under_way[self._slot]

    def is_read(self) -> bool:
        """Tell whether they have."""
        stamp = self._stamp + _Phase.READ
        return all(self.peers.has_come(rank, self._slot, stamp) for rank in self._others)

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block: nobody knows."""
        return False

    def meet(self) -> None:
        """Say that this rank has its sum, and wait until all others have theirs."""
        self._say(_Phase.SUMMED)
        self._all_are(_Phase.SUMMED)

    def _say(self, phase: _Phase) -> None:
        address = self.buffer.tensor.data_ptr() if self._room is None else self._room.address
        self.peers.own.write(self._slot, Record(self._stamp + phase, address, self._kind))

    def _all_are(self, phase: _Phase) -> dict[int, Record]:
        """Wait until all others are so far; return what they have said. Who is gone reads nothing."""
        stamp, gone = self._stamp + phase, phase is _Phase.READ
        waiting = partial(self.peers.wait_for, slot=self._slot, stamp=stamp, table=self.table, may_be_gone=gone)
        return {rank: waiting(rank) for rank in self._others}


Act = Callable[..., None]


def start_exchange(
    act: Act, buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], number: int, table: GroupTable, peers: Peers
) -> Exchange:
    """Start one of the exchanges below, of a buffer of segments. Collective over `ranks`.

    Exchanges of different numbers may be under way together; all ranks wait for theirs in one order.
    """
    what = f"{act.__name__.removeprefix('run_')} of {list(sizes)} {buffer.tensor.dtype}"
    acting = partial(act, sizes=sizes, peers=peers)
    return Exchange(tuple(ranks), [_Reading(acting, buffer, ranks, 1 + number, peers, table, what)], table=table)


def _slot_of(number: int, count: int, ranks: Sequence[int]) -> int:
    """Return the slot of an exchange, the count-th of its number; 0 is the number of those waited for at once."""
    most = BOARD_SLOTS // AT_ONCE - 1
    if number > most:
        raise CommError(f"exchange {number - 1} of ranks {list(ranks)} is one of more than {most}; use fewer buckets")
    return number * AT_ONCE + count % AT_ONCE


def gather_pieces(
    pieces: Sequence[Flat],
    rooms: Mapping[int, Sequence[Flat]],
    sizes: Sequence[int],
    ranks: Sequence[int],
    number: int,
    table: GroupTable,
    peers: Peers,
) -> Exchange:
    """Start to take every other rank's pieces from where each stands, without a buffer. Collective over `ranks`.

    Args:
        pieces: of this rank, `sizes` of its rank in all.
        rooms: for those of the others, in their order.
        sizes: elements by rank.
        ranks: all.
        number: see `start_exchange`.
        table: the ranks.
        peers: their processes.
    """
    places = Flat(torch.tensor([piece.tensor.data_ptr() for piece in pieces], dtype=torch.int64))

    def act(reading: _Reading, addresses: Addresses) -> None:
        assert len(pieces) == len(places.tensor)  # they stand where they are until all have read them
        for rank, of_rank in rooms.items():
            if of_rank:
                there = Flat(torch.empty(len(of_rank), dtype=torch.int64))
                peers.read(rank, addresses[rank], there)
                peers.read_all(rank, there.tensor.tolist(), of_rank)

    dtypes = {str(x.tensor.dtype) for x in (*pieces, *(room for of_rank in rooms.values() for room in of_rank))}
    what = f"gather_pieces_here of {list(sizes)} {sorted(dtypes)}"
    return Exchange(tuple(ranks), [_Reading(act, places, ranks, 1 + number, peers, table, what)], table=table)


def run_sum_all(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.sum_all` does: each rank sums a part, and reads the others' sums."""
    parts = even_sizes(sum(sizes), len(reading.ranks))
    run_sum_segments(reading, addresses, parts, peers)
    reading.meet()
    run_gather_segments(reading, addresses, parts, peers)


def run_gather_segments(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.gather_segments` does."""
    for rank, part, offset in zip(reading.ranks, reading.buffer.segments(sizes), _offsets(sizes), strict=True):
        if rank != reading.table.rank:
            peers.read(rank, addresses[rank] + offset * part.tensor.itemsize, part)


def run_sum_segments(reading: _Reading, addresses: Addresses, sizes: Sequence[int], peers: Peers) -> None:
    """Do what `collectives.sum_segments` does."""
    here = reading.table.position(reading.ranks)
    own, offset = reading.buffer.segments(sizes)[here].tensor, _offsets(sizes)[here] * reading.buffer.tensor.itemsize
    _sum_into(own, own, addresses, offset, reading.table.rank, peers)


def _sum_into(result: Tensor, own: Tensor, addresses: Addresses, offset: int, here: int, peers: Peers) -> None:
    """Sum this rank's flat tensor with those of the others, `offset` bytes into their buffers, in the order of ranks.

    `result` may be this rank's own.
    """
    copied = [rank for rank, address in addresses.items() if not is_room(address)]
    most = CHUNK_BYTES // own.itemsize // len(addresses) if copied or len(addresses) > 1 else own.numel()
    most = max(1, most)
    room = own.new_empty(len(copied), min(most, own.numel()))
    rooms = dict(zip(copied, room, strict=True))
    for start in range(0, own.numel(), most):
        mine, place = own[start : start + most], offset + start * own.itemsize
        given = {rank: rooms.get(rank, mine)[: mine.numel()] for rank in addresses}
        parts = {rank: peers.part(rank, addresses[rank], place, Flat(like)) for rank, like in given.items()}
        parts[here] = mine
        into = mine if result is own else result[start : start + most]
        sum_in_order(into, [parts[rank] for rank in sorted(parts)])


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]


def sum_read(x: Tensor, ranks: Sequence[int], table: GroupTable, peers: Peers) -> Tensor:
    """Do what `collectives.sum_tensor` does: every rank reads all of the others' tensors, which stay as they are."""
    with guarded("all-reduce", ranks, table):
        return begin_sum_read(x, ranks, table, peers).end()


def room_of_summand(shape: Sequence[int], dtype: torch.dtype, peers: Peers) -> Summand | None:
    """Return where a summand can be made so that the others read it there; None where there is no such place."""
    room = peers.room(prod(shape) * dtype.itemsize)
    return None if room is None else Summand(room.tensor(shape, dtype), room)


def begin_sum_read(x: Tensor | Summand, ranks: Sequence[int], table: GroupTable, peers: Peers) -> PendingWork[Tensor]:
    """Begin what `sum_read` does; a tensor is copied to a room if there is one. The caller guards all below."""
    summand = x if isinstance(x, Summand) else _placed(x, peers)
    own = summand.value
    result = torch.empty_like(own)

    def act(reading: _Reading, addresses: Addresses) -> None:
        _sum_into(result.view(-1), own.view(-1), addresses, 0, table.rank, peers)

    return PendingWork(result, _begun(act, own, ranks, peers, table, "all-reduce", list(own.shape), summand.room))


def _placed(x: Tensor, peers: Peers) -> Summand:
    """Copy a tensor to a room; where there is none, only if it is not dense."""
    summand = room_of_summand(x.shape, x.dtype, peers)
    if summand is None:
        return Summand(dense(x))
    summand.value.copy_(x.detach())
    return summand


def gather_read(
    x: Tensor,
    shapes: Sequence[Sequence[int]],
    ranks: Sequence[int],
    table: GroupTable,
    peers: Peers,
    what: str = "all-gather",
) -> list[Tensor]:
    """Do what `collectives.gather_parts` does; `what` it is, for messages."""
    with guarded(what, ranks, table):
        return begin_gather_read(x, shapes, ranks, table, peers, what).end()


def begin_gather_read(
    x: Tensor,
    shapes: Sequence[Sequence[int]],
    ranks: Sequence[int],
    table: GroupTable,
    peers: Peers,
    what: str = "all-gather",
) -> PendingWork[list[Tensor]]:
    """Begin what `gather_read` does."""
    own = dense(x)
    parts = [own if r == table.rank else own.new_empty(list(s)) for r, s in zip(ranks, shapes, strict=True)]

    def act(reading: _Reading, addresses: Addresses) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            if rank != table.rank and part.numel():
                peers.read(rank, addresses[rank], Flat.over(part))

    return PendingWork(parts, _begun(act, own, ranks, peers, table, what, [list(shape) for shape in shapes]))


def reduce_read(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, peers: Peers) -> Tensor:
    """Do what `collectives.reduce_parts` does."""
    with guarded("reduce-scatter", ranks, table):
        return begin_reduce_read(parts, ranks, table, peers).end()


def begin_reduce_read(
    parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, peers: Peers
) -> PendingWork[Tensor]:
    """Begin what `reduce_read` does."""
    here, sizes = table.position(ranks), [part.numel() for part in parts]
    buffer, room = _end_to_end(parts, peers)
    own, offset = Flat(buffer).segments(sizes)[here].tensor, _offsets(sizes)[here] * buffer.itemsize
    result = torch.empty_like(parts[here], memory_format=torch.contiguous_format)

    def act(reading: _Reading, addresses: Addresses) -> None:
        _sum_into(result.view(-1), own, addresses, offset, table.rank, peers)

    return PendingWork(result, _begun(act, buffer, ranks, peers, table, "reduce-scatter", sizes, room))


def _end_to_end(parts: Sequence[Tensor], peers: Peers) -> Summand:
    """Return parts as one flat tensor: where they stand, if they do so end to end, else copied."""
    first, places = parts[0], {part.untyped_storage().data_ptr() for part in parts}
    is_flat = all(map(is_dense, parts))
    starts = accumulate((part.numel() for part in parts), initial=first.storage_offset())
    pairs, total = zip(parts, starts, strict=False), sum(part.numel() for part in parts)
    if is_flat and len(places) == 1 and all(part.storage_offset() == start for part, start in pairs):
        return Summand(first.detach().as_strided((total,), (1,)))
    summand = room_of_summand((total,), first.dtype, peers) or Summand(first.new_empty(total))
    torch.cat([dense(part).view(-1) for part in parts], out=summand.value)
    return summand


def _begun(
    act: Callable[[_Reading, Addresses], None],
    own: Tensor,
    ranks: Sequence[int],
    peers: Peers,
    table: GroupTable,
    what: str,
    sizes: object,
    room: SharedBuffer | None = None,
) -> Exchange:
    told = f"{what} of {sizes} {own.dtype}"
    return Exchange(tuple(ranks), [_Reading(act, Flat.over(own), ranks, 0, peers, table, told, room=room)], table=table)
