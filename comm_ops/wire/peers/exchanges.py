"""Collectives of ranks that read each other's memory: each says where its tensor stands, and nothing is sent.

In between ranks read and sum, each its own segment, in the order of the ranks: sums have the same bits as those of
messages. All of it is done in `wait`. Measured on two processes of one core each, milliseconds by messages and so:
the sum of a bucket of 12.4 MB 6.4 and 2.3, an all-reduce of 2 MB in an op 2.6 and 0.4, of 64 KB 0.23 and 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.wire.collectives import Exchange, GroupCollectives, Made, sum_in_order
from hetu_fx.comm_ops.wire.flat import Flat, dense, is_dense
from hetu_fx.comm_ops.wire.peers.memory import BOARD_SLOTS, Peers, Record
from hetu_fx.comm_ops.wire.peers.rooms import SharedBuffer, is_room
from hetu_fx.comm_ops.wire.small_sums import refuse_unlike
from hetu_fx.errors import CommError

AT_ONCE = 32
"""So many exchanges of one number may be under way: a step's parts under several variants, for example."""

CHUNK_BYTES = 1 << 20
"""What is summed is read in chunks that stay in a core's cache."""

Addresses = Mapping[int, int]
"""Of the other ranks' buffers."""


class Summand(NamedTuple):
    """A tensor to be summed, dense, and the room in which it stands, if it does."""

    value: Tensor
    room: SharedBuffer | None = None


class _Phase(IntEnum):
    """How far a rank is in an exchange."""

    STANDS = 1  # its buffer stands where it says
    SUMMED = 2  # what it sums is there
    READ = 3  # it reads nothing any more


Act = Callable[["SharedExchange", Addresses], None]
"""Reads, given where the others' buffers are."""


class SharedExchange:
    """An exchange under way: `wait` does it, once all have said where their buffers are.

    Args:
        act: what it does.
        buffer: this rank's.
        of: the collectives that it is one of; those of one number begin in one order on all ranks, and so they end.
        what: it is, the same on all: its kind, sizes and dtype.
        room: in which the buffer stands, if it does. There it stays, so that `wait` need not wait until it is read.
    """

    def __init__(
        self, act: Act, buffer: Flat, of: SharedMemoryCollectives, what: str, room: SharedBuffer | None = None
    ) -> None:
        self.buffer, self.table, self.peers, self._room = buffer, of.table, of.peers, room
        self._act: Act | None = act
        self._what, self._kind = what, crc32(what.encode())
        self._others = [rank for rank in of.ranks if rank != of.table.rank]
        number = 0 if of.number is None else 1 + of.number
        self.peers.counts[number] += 1
        count = self.peers.counts[number]
        self._slot, self._stamp = _slot_of(number, count, of.ranks), count * len(_Phase)
        before = self.peers.under_way.get(self._slot)
        if before is not None and before._act is None:  # it stands on: no other that stands has come since
            before.end()
        elif before is not None:
            raise CommError(
                f"more than {AT_ONCE} exchanges {number} of ranks {list(of.ranks)} are under way; end one before the "
                "next"
            )
        self.peers.under_way[self._slot] = self
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
            self.peers.let_stand(self)

    def end(self) -> None:
        """Stay until the others have read this rank's buffer; who has gone reads nothing."""
        self._all_are(_Phase.READ)
        if self.peers.under_way.get(self._slot) is self:
            del self.peers.under_way[self._slot]

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


def _slot_of(number: int, count: int, ranks: Sequence[int]) -> int:
    """Return the slot of an exchange, the count-th of its number; 0 is the number of those of ops."""
    most = BOARD_SLOTS // AT_ONCE - 1
    if number > most:
        raise CommError(f"exchange {number - 1} of ranks {list(ranks)} is one of more than {most}; use fewer buckets")
    return number * AT_ONCE + count % AT_ONCE


@dataclass(frozen=True, slots=True)
class SharedMemoryCollectives(GroupCollectives):
    """Reads what the others have from where it stands; the memory of this rank stays until they have read it.

    Attributes:
        peers: the ranks' processes.
    """

    peers: Peers = field(kw_only=True)

    def _sum(self, x: Tensor | Summand) -> Exchange[Tensor]:
        """A tensor is copied to a room if there is one; every rank reads all of the others' tensors."""
        if self.number is not None:
            assert isinstance(x, Tensor), "what is summed in place stands where it stands"
            return self._sum_in_place(x)
        own, room = x if isinstance(x, Summand) else self._in_room(x)
        result = torch.empty_like(own)

        def act(exchange: SharedExchange, addresses: Addresses) -> None:
            self._add(result.view(-1), own.view(-1), addresses, 0)

        return self._start(act, own, f"all-reduce of {list(own.shape)}", result, room)

    def _sum_in_place(self, x: Tensor) -> Exchange[Tensor]:
        """Let each rank sum a part, and read the others' sums."""
        sizes = even_sizes(x.numel(), len(self.ranks))
        parts, here = x.split(list(sizes)), self.table.position(self.ranks)
        starts = [start * x.itemsize for start in accumulate(sizes, initial=0)]

        def act(exchange: SharedExchange, addresses: Addresses) -> None:
            self._add(parts[here], parts[here], addresses, starts[here])
            exchange.meet()
            for rank, part, start in zip(self.ranks, parts, starts, strict=False):
                if rank != self.table.rank:
                    self.peers.read(rank, addresses[rank] + start, Flat(part))

        return self._start(act, x, f"sum_all of {[x.numel()]}", x)

    def _gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None
    ) -> Exchange[list[Tensor]]:
        own, here = dense(x), self.table.position(self.ranks)
        parts = into or [own if i == here else own.new_empty(list(shape)) for i, shape in enumerate(shapes)]

        def act(exchange: SharedExchange, addresses: Addresses) -> None:
            for rank, part in zip(self.ranks, parts, strict=True):
                if rank != self.table.rank and part.numel():
                    self.peers.read(rank, addresses[rank], Flat.over(part))

        name = "all-gather" if into is None else "gather_segments"
        sizes = [list(shape) if into is None else part.numel() for shape, part in zip(shapes, parts, strict=True)]
        return self._start(act, own, f"{name} of {sizes}", list(parts))

    def _scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        here, sizes = self.table.position(self.ranks), [part.numel() for part in parts]
        buffer, room = self._end_to_end(parts)
        start = sum(sizes[:here])
        own, result = buffer[start : start + sizes[here]], parts[here]
        if self.number is None:
            result = torch.empty_like(result, memory_format=torch.contiguous_format)
        into, offset = own if self.number is not None else result.view(-1), start * buffer.itemsize

        def act(exchange: SharedExchange, addresses: Addresses) -> None:
            self._add(into, own, addresses, offset)

        name = "reduce-scatter" if self.number is None else "sum_segments"
        return self._start(act, buffer, f"{name} of {sizes}", result, room)

    def take(self, pieces: Sequence[Flat], rooms: Mapping[int, Sequence[Flat]], sizes: Sequence[int]) -> Exchange[None]:
        """Start to take every other rank's pieces from where each stands, without a buffer.

        Args:
            pieces: of this rank, `sizes` of its rank in all.
            rooms: for those of the others, in their order.
            sizes: elements by rank.
        """
        places = torch.tensor([piece.tensor.data_ptr() for piece in pieces], dtype=torch.int64)

        def act(exchange: SharedExchange, addresses: Addresses) -> None:
            assert len(pieces) == len(places)  # they stand where they are until all have read them
            for rank, of_rank in rooms.items():
                if of_rank:
                    there = torch.empty(len(of_rank), dtype=torch.int64)
                    self.peers.read(rank, addresses[rank], Flat(there))
                    self.peers.read_all(rank, there.tolist(), of_rank)

        dtypes = {str(x.tensor.dtype) for x in (*pieces, *(room for of_rank in rooms.values() for room in of_rank))}
        return self._start(act, places, f"gather_pieces_here of {list(sizes)} {sorted(dtypes)}", None)

    def _start(self, act: Act, own: Tensor, what: str, made: Made, room: SharedBuffer | None = None) -> Exchange[Made]:
        started = SharedExchange(act, Flat.over(own), self, f"{what} {own.dtype}", room)
        return self._under_way([started], made)

    def _add(self, result: Tensor, own: Tensor, addresses: Addresses, offset: int) -> None:
        """Sum this rank's flat tensor with the others', `offset` bytes into their buffers, in the order of ranks.

        `result` may be this rank's own.
        """
        peers = self.peers
        copied = [rank for rank, address in addresses.items() if not is_room(address)]
        most = CHUNK_BYTES // own.itemsize // len(addresses) if copied or len(addresses) > 1 else own.numel()
        most = max(1, most)
        room = own.new_empty(len(copied), min(most, own.numel()))
        rooms = dict(zip(copied, room, strict=True))
        for start in range(0, own.numel(), most):
            mine, place = own[start : start + most], offset + start * own.itemsize
            given = {rank: rooms.get(rank, mine)[: mine.numel()] for rank in addresses}
            parts = {rank: peers.part(rank, addresses[rank], place, Flat(like)) for rank, like in given.items()}
            parts[self.table.rank] = mine
            into = mine if result is own else result[start : start + most]
            sum_in_order(into, [parts[rank] for rank in sorted(parts)])

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Summand | None:
        """Return where a summand can be made so that the others read it there; None where there is no such place."""
        room = self.peers.room(prod(shape) * dtype.itemsize)
        return None if room is None else Summand(room.tensor(shape, dtype), room)

    def _in_room(self, x: Tensor) -> Summand:
        """Copy a tensor to a room; where there is none, only if it is not dense."""
        summand = self.place(x.shape, x.dtype)
        if summand is None:
            return Summand(dense(x))
        summand.value.copy_(x.detach())
        return summand

    def _end_to_end(self, parts: Sequence[Tensor]) -> Summand:
        """Return parts as one flat tensor: where they stand, if they do so end to end, else copied."""
        first, places = parts[0], {part.untyped_storage().data_ptr() for part in parts}
        is_flat = all(map(is_dense, parts))
        starts = accumulate((part.numel() for part in parts), initial=first.storage_offset())
        pairs, total = zip(parts, starts, strict=False), sum(part.numel() for part in parts)
        if is_flat and len(places) == 1 and all(part.storage_offset() == start for part, start in pairs):
            return Summand(first.detach().as_strided((total,), (1,)))
        assert self.number is None, "what is summed in place stands end to end"
        summand = self.place((total,), first.dtype) or Summand(first.new_empty(total))
        torch.cat([dense(part).view(-1) for part in parts], out=summand.value)
        return summand
