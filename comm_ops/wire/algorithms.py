"""Collectives by the algorithm that their op carries: the one place where flat, padded and two-level part.

Where ranks can, they read each other's memory instead of sending (`peers`): of one node as a rule, inside of it too.

Collectives of groups that span nodes, in two levels: inside every node and across, each byte crossing once. So at each
tier, where nodes stand in racks: what goes across goes in two levels again, inside every rack and across. An all-reduce
is a reduce-scatter inside, an all-reduce across and an all-gather inside; an all-gather goes across first, a
reduce-scatter inside first. Across, ranks meet in lanes of one rank per node. Where nodes have unequal numbers of
ranks, those of a smaller node stand in several lanes; an all-reduce uses as many lanes as the smallest node has ranks.
The first and second level of an all-gather copy bits; sums are made per node first.

One of host memory runs beside what else a rank does. A level can only start when the one before has arrived, and a
rank in its backward cannot wait for that: its peers may need what it has yet to work out. So a thread takes the
levels, exchange by exchange in the order in which all ranks start them. Its messages are in groups of its own
(`GroupTable.beside`), where no other message comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.plans.algorithm import Algorithm, by_node, lane_at, lanes, member_tiers
from hetu_fx.comm_ops.wire.collectives import Exchange, FlatCollectives, GroupCollectives, Made, PaddedCollectives
from hetu_fx.comm_ops.wire.flat import dense
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers.exchanges import SharedMemoryCollectives, Summand
from hetu_fx.comm_ops.wire.peers.memory import peers_worth_reading

Levels = tuple[tuple[int, ...], ...]
Tiers = Sequence[Sequence[int]]
"""The unit of each rank, from inside out: its node, and what that stands in."""


def _one_level(
    like: Tensor,
    num_bytes: int,
    ranks: Sequence[int],
    table: GroupTable,
    number: int | None = None,
    *,
    is_async: bool = False,
    pads: bool = False,
) -> GroupCollectives:
    """Return what carries so many bytes, of tensors like one: memory that all ranks read, as all know, else messages.

    `pads`: uneven parts of messages. The first call for some ranks is collective over them.
    """
    is_there = like.is_cpu and max(ranks) < table.size  # else it is refused where it is sent
    on_host = is_there and (number is not None or not any(table.cuts(rank) for rank in ranks if rank != table.rank))
    if peers := peers_worth_reading(num_bytes, ranks, table, on_host=on_host):
        return SharedMemoryCollectives(ranks, table, number, is_async, peers=peers)
    return (PaddedCollectives if pads else FlatCollectives)(ranks, table, number, is_async)


def gathered_bytes(x: Tensor, shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of all that is gathered, of parts of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes) * x.element_size()


@dataclass(frozen=True, slots=True)
class TwoLevelCollectives(GroupCollectives):
    """In a thread for host memory, unless the caller waits; at once on a device, whose own queue goes on meanwhile.

    Attributes:
        tiers: see the module; one or more.
    """

    tiers: Tiers = field(kw_only=True)

    def _sum(self, x: Tensor) -> Exchange[Tensor]:
        return self._run(x, lambda at: at._put(x, at._summed(x)))

    def _gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None
    ) -> Exchange[list[Tensor]]:
        def act(at: TwoLevelCollectives) -> list[Tensor]:
            found = at._gathered(x, shapes)
            for rank, part, value in zip(self.ranks, into or (), found, strict=into is not None):
                if rank != self.table.rank:
                    part.copy_(value)
            return found

        return self._run(x, act)

    def _scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        mine = parts[self.table.position(self.ranks)]
        return self._run(mine, lambda at: at._put(mine, at._scattered(parts)))

    def _started(self, what: str, begin: Callable[[], Exchange[Made]]) -> Exchange[Made]:
        """Where the caller waits, that is for what is inside, of which each is guarded."""
        return GroupCollectives._started(self, what, begin) if self.is_async else begin()

    def _put(self, place: Tensor, found: Tensor) -> Tensor:
        """Put a sum in its place, if it has one."""
        return found if self.number is None else place.copy_(found)

    def _run(self, like: Tensor, act: Callable[[TwoLevelCollectives], Made]) -> Exchange[Made]:
        """Do something after what was started so before, by the table that is given for it."""
        if not (self.is_async and like.is_cpu):
            return Exchange(made=act(self))
        beside = replace(self, table=self.table.beside("levels"))
        for group in _groups(self.ranks, self.tiers, self.table.rank):
            beside.table.group(group)  # created here, as threads must not create groups side by side
        exchange: Exchange[Made] = Exchange(tuple(self.ranks), table=self.table)

        def work() -> None:
            with torch.no_grad():
                exchange.made = act(beside)

        exchange.works.append(self.table.serial.start(work))
        return exchange

    def _sum_of(self, x: Tensor, ranks: Sequence[int], tiers: Tiers = ()) -> Tensor:
        if tiers:
            return replace(self, ranks=ranks, tiers=tiers)._summed(x)
        return _one_level(x, x.nbytes, ranks, self.table).sum(x).wait()

    def _parts_of(
        self, x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], tiers: Tiers = ()
    ) -> list[Tensor]:
        if tiers:
            return replace(self, ranks=ranks, tiers=tiers)._gathered(x, shapes)
        return _one_level(x, gathered_bytes(x, shapes), ranks, self.table).gather(x, shapes).wait()

    def _part_of(self, parts: Sequence[Tensor], ranks: Sequence[int], tiers: Tiers = ()) -> Tensor:
        if tiers:
            return replace(self, ranks=ranks, tiers=tiers)._scattered(parts)
        return _one_level(parts[0], sum(part.nbytes for part in parts), ranks, self.table).scatter(parts).wait()

    def _outer(self, members: Sequence[int]) -> Tiers:
        """Return what some of the ranks stand in, beyond their nodes."""
        return member_tiers(self.tiers[1:], self.ranks, members)

    def _summed(self, x: Tensor) -> Tensor:
        levels, inside = self._levels
        place, count = inside.index(self.table.rank), min(map(len, levels))
        sizes = [*even_sizes(x.numel(), count), *([0] * (len(inside) - count))]
        mine = self._part_of(dense(x).view(-1).split(sizes), inside)
        if place < count:
            lane = lane_at(levels, place)
            mine = self._sum_of(mine, lane, self._outer(lane))
        return torch.cat(self._parts_of(mine, [[size] for size in sizes], inside)).view(x.shape)

    def _gathered(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        levels, inside = self._levels
        numels = {rank: torch.Size(shape).numel() for rank, shape in zip(self.ranks, shapes, strict=True)}
        arrived: list[Tensor] = []
        for lane, members in _own_lanes(levels, self.table.rank):
            owners = _owners(levels, lane)
            mine = dense(x).view(-1) if self.table.rank in owners else x.new_empty(0)
            carried = [[numels.get(owner, 0)] for owner in owners]
            arrived += self._parts_of(mine, carried, members, self._outer(members))
        brought = [_brought(levels, place, len(inside)) for place in range(len(inside))]
        sizes = [[sum(numels[owner] for owner in owners)] for owners in brought]
        flats = self._parts_of(torch.cat(arrived), sizes, inside)
        found: dict[int, Tensor] = {}
        for flat, owners in zip(flats, brought, strict=True):
            found |= zip(owners, flat.split([numels[owner] for owner in owners]), strict=True)
        return [found[rank].view(list(shape)) for rank, shape in zip(self.ranks, shapes, strict=True)]

    def _scattered(self, parts: Sequence[Tensor]) -> Tensor:
        levels, inside = self._levels
        flats = {rank: dense(part).view(-1) for rank, part in zip(self.ranks, parts, strict=True)}
        brought = [_brought(levels, place, len(inside)) for place in range(len(inside))]
        sizes = [sum(flats[owner].numel() for owner in owners) for owners in brought]
        together = torch.cat([flats[owner] for owners in brought for owner in owners])
        summed = self._part_of(together.split(sizes), inside)
        owners = brought[inside.index(self.table.rank)]
        sums = dict(zip(owners, summed.split([flats[owner].numel() for owner in owners]), strict=True))
        mine = summed.new_empty(0)
        for lane, members in _own_lanes(levels, self.table.rank):
            pieces = [sums.get(owner, summed.new_empty(0)) for owner in _owners(levels, lane)]
            total = self._part_of(pieces, members, self._outer(members))
            mine = total if self.table.rank in _owners(levels, lane) else mine
        return mine.view(parts[self.table.position(self.ranks)].shape)

    @property
    def _levels(self) -> tuple[Levels, tuple[int, ...]]:
        """The ranks of every node, and those of this rank's."""
        levels = by_node(tuple(self.ranks), tuple(self.tiers[0]))
        return levels, _inside(levels, self.table.rank)


def _groups(ranks: Sequence[int], tiers: Tiers, rank: int) -> Iterator[tuple[int, ...]]:
    """List the groups that `rank` may meet in, inside its node and in its lanes, in the one order of all ranks."""
    levels = by_node(tuple(ranks), tuple(tiers[0]))
    if len(inside := _inside(levels, rank)) > 1:
        yield inside
    for _, lane in _own_lanes(levels, rank):
        if len(tiers) > 1:
            yield from _groups(lane, member_tiers(tiers[1:], ranks, lane), rank)
        elif len(lane) > 1:
            yield lane


def _inside(levels: Levels, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in levels if rank in ranks)


def _own_lanes(levels: Levels, rank: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """List this rank's lanes in order, the one order in which all ranks run them."""
    return ((lane, members) for lane, members in enumerate(lanes(levels)) if rank in members)


def _owners(levels: Levels, lane: int) -> list[int]:
    """Return the rank of each node whose part travels in a lane; -1 where a node has no more ranks."""
    return [ranks[lane] if lane < len(ranks) else -1 for ranks in levels]


def _brought(levels: Levels, place: int, count: int) -> list[int]:
    """List the ranks whose parts the lanes of position `place` of `count` in its node carry, in order."""
    owners = (_owners(levels, lane) for lane in range(place, max(map(len, levels)), count))
    return [owner for found in owners for owner in found if owner >= 0]


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of some ranks; each is started, and ended by `wait`. See `GroupCollectives`.

    Attributes:
        ranks: in the order of parts.
        algorithm: says by size how they run.
        table: of the ranks.
        number: None: of an op. Else they work in place on buffers of the bridge, which go in levels from the host
            alone, as NCCL finds its own way between nodes, and are not padded.
        is_async: see `GroupCollectives`.
    """

    ranks: Sequence[int]
    algorithm: Algorithm
    table: GroupTable
    number: int | None = None
    is_async: bool = True

    def sum(self, x: Tensor | Summand) -> Exchange[Tensor]:
        """Sum a tensor, or what was made where `place_of_sum` says."""
        like = x.value if isinstance(x, Summand) else x
        return self._by_size(like, like.nbytes).sum(x)

    def gather(
        self, x: Tensor, shapes: Sequence[Sequence[int]], into: Sequence[Tensor] | None = None
    ) -> Exchange[list[Tensor]]:
        """Bring the tensors of all ranks to all; see `GroupCollectives.gather`."""
        return self._by_size(x, gathered_bytes(x, shapes)).gather(x, shapes, into)

    def scatter(self, parts: Sequence[Tensor]) -> Exchange[Tensor]:
        """Sum this rank's part; see `GroupCollectives.scatter`."""
        return self._by_size(parts[0], sum(part.nbytes for part in parts)).scatter(parts)

    def place_of_sum(self, like: Tensor, shape: Sequence[int]) -> Summand | None:
        """Return where to make what `sum` is to sum, so that others read it there; None where it does not matter.

        Nobody but the sum has it. All ranks ask alike.
        """
        reader = self.reader(like, prod(shape) * like.itemsize)
        return None if reader is None else reader.place(shape, like.dtype)

    def reader(self, like: Tensor, num_bytes: int) -> SharedMemoryCollectives | None:
        """Return what carries so many bytes by memory of ranks that all have tensors like one; None where they send."""
        found = replace(self, number=None)._by_size(like, num_bytes)
        return replace(found, number=self.number) if isinstance(found, SharedMemoryCollectives) else None

    def meet(self, num_bytes: int, *, on_host: bool) -> None:
        """Connect the ranks for so many bytes, if they are not yet; collective over them."""
        if len(self.ranks) > 1 and not self._in_levels(num_bytes, on_host=on_host):
            self.table.group(self.ranks)
            peers_worth_reading(num_bytes, self.ranks, self.table, on_host=on_host)

    def _in_levels(self, num_bytes: int, *, on_host: bool) -> bool:
        return (on_host or self.number is None) and self.algorithm.in_two_levels(num_bytes)

    def _by_size(self, like: Tensor, num_bytes: int) -> GroupCollectives:
        if self._in_levels(num_bytes, on_host=like.is_cpu):
            tiers = self.algorithm.tiers
            return TwoLevelCollectives(self.ranks, self.table, self.number, self.is_async, tiers=tiers)
        pads = self.number is None and self.algorithm.pads(num_bytes)
        return _one_level(like, num_bytes, self.ranks, self.table, self.number, is_async=self.is_async, pads=pads)
