"""Collectives of groups that span nodes, in two levels: inside every node and across, each byte crossing once.

So at each tier, where nodes stand in racks: what goes across goes in two levels again, inside every rack and across.
An all-reduce is a reduce-scatter inside, an all-reduce across and an all-gather inside; an all-gather goes
across first, a reduce-scatter inside first. Across, ranks meet in lanes of one rank per node. Where nodes have
unequal numbers of ranks, those of a smaller node stand in several lanes; an all-reduce uses as many lanes as the
smallest node has ranks. The first and second level of an all-gather copy bits; sums are made per node first.

`..._by` runs a collective by the algorithm that its op carries: the one place where flat, padded and two-level part.
Where ranks can, they read each other's memory instead of sending (`peers`): of one node as a rule, inside of it too.
`start_in_levels` runs one beside what else a rank does. A level can only start when the one before has arrived, and a
rank in its backward cannot wait for that: its peers may need what it has yet to work out. So a thread takes the
levels, exchange by exchange in the order in which all ranks start them. Its messages are in groups of its own
(`GroupTable.beside`), where no other message comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hetu_fx.annotations.states import even_sizes
from hetu_fx.comm_ops.plans.algorithm import Algorithm, by_node, lanes, member_tiers
from hetu_fx.comm_ops.wire.collectives import (
    Exchange,
    gather_as_padded,
    gather_parts,
    reduce_as_padded,
    reduce_parts,
    sum_tensor,
)
from hetu_fx.comm_ops.wire.flat import Flat, dense
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.comm_ops.wire.peers.exchanges import gather_read, reduce_read, sum_read
from hetu_fx.comm_ops.wire.peers.memory import Peers, peers_worth_reading
from hetu_fx.comm_ops.wire.serial_threads import SerialExecutor

Levels = tuple[tuple[int, ...], ...]
Tiers = Sequence[Sequence[int]]
"""The unit of each rank, from inside out: its node, and what that stands in."""


def _sum_across(x: Tensor, ranks: Sequence[int], tiers: Tiers, table: GroupTable) -> Tensor:
    return _sum_in_levels(x, ranks, tiers, table) if tiers else _sum_flat(x, ranks, table)


def _gather_across(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], tiers: Tiers, table: GroupTable
) -> list[Tensor]:
    if tiers:
        return _gather_in_levels(x, shapes, ranks, tiers, table)
    return _gather_flat(x, shapes, ranks, table)


def _reduce_across(parts: Sequence[Tensor], ranks: Sequence[int], tiers: Tiers, table: GroupTable) -> Tensor:
    return _reduce_in_levels(parts, ranks, tiers, table) if tiers else _reduce_flat(parts, ranks, table)


def _sum_in_levels(x: Tensor, ranks: Sequence[int], tiers: Tiers, table: GroupTable) -> Tensor:
    """Return the sum of `x` over `ranks` as a new contiguous tensor, the same bits on all of them."""
    levels = by_node(tuple(ranks), tuple(tiers[0]))
    inside = _inside(levels, table.rank)
    place, count = inside.index(table.rank), min(map(len, levels))
    sizes = [*even_sizes(x.numel(), count), *([0] * (len(inside) - count))]
    mine = _reduce_flat(dense(x).view(-1).split(sizes), inside, table)
    if place < count:
        lane = lanes(levels)[place]
        mine = _sum_across(mine, lane, member_tiers(tiers[1:], ranks, lane), table)
    return torch.cat(_gather_flat(mine, [[size] for size in sizes], inside, table)).view(x.shape)


def _gather_in_levels(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], tiers: Tiers, table: GroupTable
) -> list[Tensor]:
    """Return the tensors of all `ranks`, of shape `shapes[i]`, in their order."""
    levels = by_node(tuple(ranks), tuple(tiers[0]))
    inside = _inside(levels, table.rank)
    numels = {rank: torch.Size(shape).numel() for rank, shape in zip(ranks, shapes, strict=True)}
    arrived: list[Tensor] = []
    for lane, members in _own_lanes(levels, table.rank):
        owners = _owners(levels, lane)
        mine = dense(x).view(-1) if table.rank in owners else x.new_empty(0)
        outer, carried = member_tiers(tiers[1:], ranks, members), [[numels.get(owner, 0)] for owner in owners]
        arrived += _gather_across(mine, carried, members, outer, table)
    brought = [_brought(levels, place, len(inside)) for place in range(len(inside))]
    sizes = [[sum(numels[owner] for owner in owners)] for owners in brought]
    flats = _gather_flat(torch.cat(arrived), sizes, inside, table)
    found: dict[int, Tensor] = {}
    for flat, owners in zip(flats, brought, strict=True):
        found |= zip(owners, flat.split([numels[owner] for owner in owners]), strict=True)
    return [found[rank].view(list(shape)) for rank, shape in zip(ranks, shapes, strict=True)]


def _reduce_in_levels(parts: Sequence[Tensor], ranks: Sequence[int], tiers: Tiers, table: GroupTable) -> Tensor:
    """Return the sum over `ranks` of this rank's part as a new tensor; `parts[i]` goes to `ranks[i]`."""
    levels = by_node(tuple(ranks), tuple(tiers[0]))
    inside = _inside(levels, table.rank)
    flats = {rank: dense(part).view(-1) for rank, part in zip(ranks, parts, strict=True)}
    brought = [_brought(levels, place, len(inside)) for place in range(len(inside))]
    sizes = [sum(flats[owner].numel() for owner in owners) for owners in brought]
    together = torch.cat([flats[owner] for owners in brought for owner in owners])
    summed = _reduce_flat(together.split(sizes), inside, table)
    owners = brought[inside.index(table.rank)]
    sums = dict(zip(owners, summed.split([flats[owner].numel() for owner in owners]), strict=True))
    mine = summed.new_empty(0)
    for lane, members in _own_lanes(levels, table.rank):
        pieces = [sums.get(owner, summed.new_empty(0)) for owner in _owners(levels, lane)]
        total = _reduce_across(pieces, members, member_tiers(tiers[1:], ranks, members), table)
        mine = total if table.rank in _owners(levels, lane) else mine
    return mine.view(parts[list(ranks).index(table.rank)].shape)


def _groups_in_levels(ranks: Sequence[int], tiers: Tiers, rank: int) -> Iterator[tuple[int, ...]]:
    """List the groups that `rank` may meet in, inside its node and in its lanes, in the one order of all ranks."""
    levels = by_node(tuple(ranks), tuple(tiers[0]))
    if len(inside := _inside(levels, rank)) > 1:
        yield inside
    for _, lane in _own_lanes(levels, rank):
        if len(tiers) > 1:
            yield from _groups_in_levels(lane, member_tiers(tiers[1:], ranks, lane), rank)
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


def all_reduce_two_level(x: Tensor, ranks: Sequence[int], algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Return the sum of `x` over `ranks` as a new contiguous tensor, the same bits on all of them."""
    if algorithm.in_two_levels(x.nbytes):
        return _sum_in_levels(x, ranks, algorithm.tiers, table)
    return _sum_flat(x, ranks, table)


def _sum_flat(x: Tensor, ranks: Sequence[int], table: GroupTable) -> Tensor:
    peers = readers(x, x.nbytes, ranks, table)
    return sum_tensor(x, ranks, table) if peers is None else sum_read(x, ranks, table, peers)


def _gather_flat(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], table: GroupTable, *, pads: bool = False
) -> list[Tensor]:
    if peers := readers(x, gathered_bytes(x, shapes), ranks, table):
        return gather_read(x, shapes, ranks, table, peers)
    return (gather_as_padded if pads else gather_parts)(x, shapes, ranks, table)


def gathered_bytes(x: Tensor, shapes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of all that is gathered, of parts of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes) * x.element_size()


def _reduce_flat(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable, *, pads: bool = False) -> Tensor:
    if peers := readers(parts[0], sum(part.nbytes for part in parts), ranks, table):
        return reduce_read(parts, ranks, table, peers)
    return (reduce_as_padded if pads else reduce_parts)(parts, ranks, table)


def readers(x: Tensor, num_bytes: int, ranks: Sequence[int], table: GroupTable) -> Peers | None:
    """Return the ranks' processes where all have their tensors on the host, as all know, and read them there."""
    is_there = x.is_cpu and max(ranks) < table.size  # else it is refused where it is sent
    on_host = is_there and not any(table.cuts(rank) for rank in ranks if rank != table.rank)
    return peers_worth_reading(num_bytes, ranks, table, on_host=on_host)


def all_gather_two_level(
    x: Tensor, shapes: Sequence[Sequence[int]], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> list[Tensor]:
    """Return the tensors of all `ranks`, of shape `shapes[i]`, in their order."""
    num_bytes = gathered_bytes(x, shapes)
    if algorithm.in_two_levels(num_bytes):
        return _gather_in_levels(x, shapes, ranks, algorithm.tiers, table)
    return _gather_flat(x, shapes, ranks, table, pads=algorithm.pads(num_bytes))


def reduce_scatter_two_level(
    parts: Sequence[Tensor], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> Tensor:
    """Return the sum over `ranks` of this rank's part as a new tensor; `parts[i]` goes to `ranks[i]`."""
    num_bytes = sum(part.nbytes for part in parts)
    if algorithm.in_two_levels(num_bytes):
        return _reduce_in_levels(parts, ranks, algorithm.tiers, table)
    return _reduce_flat(parts, ranks, table, pads=algorithm.pads(num_bytes))


# Each takes the buffer, the sizes of its segments, the ranks, their tiers and a table, and works in place.
OnBuffer = Callable[[Flat, Sequence[int], Sequence[int], Tiers, GroupTable], None]

_turns: WeakKeyDictionary[GroupTable, SerialExecutor] = WeakKeyDictionary()


def start_in_levels(
    run: OnBuffer, buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], algorithm: Algorithm
) -> Exchange:
    """Start an exchange of host memory in two levels. Collective over `ranks`."""
    return in_thread(lambda beside: run(buffer, sizes, ranks, algorithm.tiers, beside), ranks, algorithm, active())


def in_thread(
    act: Callable[[GroupTable], object], ranks: Sequence[int], algorithm: Algorithm, table: GroupTable
) -> Exchange:
    """Do something in two levels after what was started so before, in a thread, given the table for it."""
    beside = table.beside("levels")
    for group in _groups_in_levels(ranks, algorithm.tiers, table.rank):
        beside.group(group)  # created here, as threads must not create groups side by side

    def work() -> None:
        with torch.no_grad():
            act(beside)

    turn = _turns.setdefault(table, SerialExecutor()).start(work)
    return Exchange(tuple(ranks), [turn], table=table)


def sum_all_in_levels(
    buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], tiers: Tiers, table: GroupTable
) -> None:
    """Do what `sum_all` does; sums are made per node first."""
    buffer.tensor.copy_(_sum_in_levels(buffer.tensor, ranks, tiers, table))


def sum_segments_in_levels(
    buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], tiers: Tiers, table: GroupTable
) -> None:
    """Do what `sum_segments` does; sums are made per node first."""
    parts = [part.tensor for part in buffer.segments(sizes)]
    parts[table.position(ranks)].copy_(_reduce_in_levels(parts, ranks, tiers, table))


def gather_segments_in_levels(
    buffer: Flat, sizes: Sequence[int], ranks: Sequence[int], tiers: Tiers, table: GroupTable
) -> None:
    """Do what `gather_segments` does."""
    parts = [part.tensor for part in buffer.segments(sizes)]
    found = _gather_in_levels(parts[table.position(ranks)], [[size] for size in sizes], ranks, tiers, table)
    for part, rank, value in zip(parts, ranks, found, strict=True):
        if rank != table.rank:
            part.copy_(value)
