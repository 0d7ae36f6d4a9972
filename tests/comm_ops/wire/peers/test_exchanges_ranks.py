"""Ranks that read each other's memory get what messages bring, bit for bit; who cannot read, sends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetu_fx.comm_ops.plans.algorithm import FLAT
from hetu_fx.comm_ops.wire.collectives import Exchange, FlatCollectives
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, active, using
from hetu_fx.comm_ops.wire.peers import exchanges, memory, system
from hetu_fx.comm_ops.wire.peers.exchanges import SharedMemoryCollectives
from hetu_fx.comm_ops.wire.peers.memory import Peers, Record, SharedMailbox, find_peers
from hetu_fx.errors import CommError, DivergedError
from tests.comm_ops.at_once import chosen, flat, gather_in_place

WORLD = 3
RANKS = 2, 0, 1  # not in the order of the group
SIZES = 1000, 0, 513
DTYPES = torch.float32, torch.bfloat16, torch.float64


def value(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def shared(
    table: GroupTable, number: int | None = None, ranks: Sequence[int] = RANKS, peers: Peers | None = None
) -> SharedMemoryCollectives:
    peers = peers or find_peers(table, ranks)
    assert peers is not None
    return SharedMemoryCollectives(ranks, table, number, peers=peers)


def gather(by: SharedMemoryCollectives, buffer: torch.Tensor, sizes: Sequence[int] = SIZES) -> Exchange[Any]:
    parts = buffer.split(list(sizes))
    return by.gather(parts[by.table.position(by.ranks)], [(size,) for size in sizes], parts)


def check_sums_have_the_bits_of_those_that_are_sent(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "CHUNK_BYTES", 200)
        for number, dtype in enumerate(DTYPES):
            here = RANKS.index(rank)
            sent, table = value(rank, dtype), GroupTable(name=f"senders {dtype}")
            with using(table):
                FlatCollectives(RANKS, active(), 0).scatter(sent.split(SIZES)).wait()
            found = value(rank, dtype)
            shared(GroupTable(name=f"readers {dtype}"), number).scatter(found.split(SIZES)).wait()
            assert torch.equal(found.split(SIZES)[here], sent.split(SIZES)[here])


def check_exchanges_of_one_number_may_be_under_way_together(rank: int, world: int, folder: Path) -> None:
    by = shared(GroupTable(name="together"), 5)
    buffers = [value(rank, torch.float64) * factor for factor in (1, 2, 3)]
    for exchange in [by.sum(buffer) for buffer in buffers]:
        exchange.wait()
    expected = value(0, torch.float64) + value(1, torch.float64) + value(2, torch.float64)
    for factor, buffer in zip((1, 2, 3), buffers, strict=True):
        torch.testing.assert_close(buffer, factor * expected, rtol=1e-12, atol=1e-12)


def check_too_many_of_one_number_are_refused_until_some_have_ended(rank: int, world: int, folder: Path) -> None:
    by = shared(GroupTable(name="many"), 0)
    begun = [by.sum(value(rank, torch.float64)) for _ in range(exchanges.AT_ONCE)]
    with pytest.raises(CommError, match=r"more than 32 exchanges 1 .* end one before the next"):
        by.sum(value(rank, torch.float64))
    del begun


def check_a_sum_that_stands_ends_when_its_number_has_come_round(rank: int, world: int, folder: Path) -> None:
    by, x = shared(GroupTable(name="round")), torch.full((3,), float(rank))
    for _ in range(2):
        place = by.place([3], x.dtype)
        assert place is not None
        place.value.copy_(x)
        assert by.sum(place).wait().tolist() == [3.0] * 3
        for _ in range(exchanges.AT_ONCE):  # none of these stands
            assert [part[0] for part in by.gather(x, [(3,)] * 3).wait()] == list(RANKS)


def check_a_sum_of_all_is_the_same_everywhere(rank: int, world: int, folder: Path) -> None:
    for number, dtype in enumerate(DTYPES):
        found = shared(GroupTable(name=f"sums {dtype}"), number).sum(value(rank, dtype)).wait()
        expected = value(0, dtype) + value(1, dtype) + value(2, dtype)
        assert torch.equal(found, expected)


def check_segments_are_gathered(rank: int, world: int, folder: Path) -> None:
    sent, table = value(rank, torch.float32), GroupTable(name="gathers")
    with using(table):
        gather_in_place(sent, SIZES, RANKS).wait()
    found = value(rank, torch.float32)
    gather(shared(GroupTable(name="gathers by reading"), 30), found).wait()
    assert torch.equal(found, sent)


def check_a_collective_of_an_op_reads_from_so_many_bytes_on(rank: int, world: int, folder: Path) -> None:
    table, ranks, read, by = GroupTable(name="ops"), (0, 1, 2), [], Peers.part

    def noted(self: Peers, rank: int, *where: Any) -> torch.Tensor:
        read.append(rank)
        return by(self, rank, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LEAST_BYTES", 4000)
        patch.setattr(Peers, "part", noted)
        for size in (999, 1000):
            x = value(rank, torch.float32)[:size].view(-1, 1)
            before = x.clone()
            run, sent = chosen(ranks, FLAT, table), flat(ranks, table)
            assert torch.equal(run.sum(x).wait(), sent.sum(x).wait())
            parts = x.split([size - 9, 0, 9])
            assert torch.equal(
                chosen(ranks, FLAT, table).scatter(parts).wait(), flat(ranks, table).scatter(parts).wait()
            )
            apart = [part.clone() for part in parts]
            assert torch.equal(
                chosen(ranks, FLAT, table).scatter(apart).wait(), flat(ranks, table).scatter(parts).wait()
            )
            assert torch.equal(x, before)
            assert bool(read) == (size == 1000)


def check_a_gather_of_uneven_parts_reads_them(rank: int, world: int, folder: Path) -> None:
    table, ranks, shapes = GroupTable(name="uneven"), (0, 1, 2), [[5, 7], [0, 7], [1, 7]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LEAST_BYTES", 0)
        x = torch.full(shapes[rank], float(rank))
        gathered = chosen(ranks, FLAT, table).gather(x, shapes).wait()
        for sender, (part, shape) in enumerate(zip(gathered, shapes, strict=True)):
            assert torch.equal(part, torch.full(shape, float(sender)))


def check_exchanges_may_be_under_way_together(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="all together")
    buffers = [value(rank, torch.float64) for _ in range(3)]
    for exchange in [shared(table, i).sum(b) for i, b in enumerate(buffers)]:
        exchange.wait()
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)


def check_ranks_of_other_networks_are_not_read(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "network_name", lambda: f"network {min(rank, 1)}")
        table = GroupTable(name="networks")
        assert find_peers(table, (0, 1, 2)) is None
        if rank > 0:
            assert find_peers(table, (1, 2)) is not None


def check_where_one_may_not_read_nobody_does(rank: int, world: int, folder: Path) -> None:
    def forbidden(process: int, address: int, place: int, size: int) -> None:
        raise PermissionError(1, "not permitted")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(system, "copy", forbidden)
        assert find_peers(GroupTable(name="forbidden"), (0, 1, 2)) is None


def check_a_process_that_has_gone_is_named(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="gone")
    peers = find_peers(table, (0, 1, 2))
    assert peers is not None
    gone = replace(peers, processes=dict.fromkeys(range(WORLD), 2**22 + os.getpid()), areas={})
    with pytest.raises(CommError, match=r"process of rank \d has gone"):
        gather(shared(table, 40, (0, 1, 2), gone), torch.zeros(10), (4, 4, 2)).wait()


def check_who_ends_after_the_last_exchange_is_not_missed(rank: int, world: int, folder: Path) -> None:
    table, look = GroupTable(name="ends"), SharedMailbox.look
    peers = find_peers(table, RANKS)
    assert peers is not None

    def has_read(slot: int) -> bool:
        return peers.own.stamp(slot) % 3 == 0

    def silent_then(self: SharedMailbox, slot: int) -> Record:
        return Record(0) if has_read(slot) else look(self, slot)

    with pytest.MonkeyPatch.context() as patch:
        exchange = gather(shared(table, 0), value(rank, torch.float32))
        slot = next(iter(peers.under_way))
        patch.setattr(SharedMailbox, "look", silent_then)
        patch.setattr(Peers, "lives", lambda peers, other: not has_read(slot))
        exchange.wait()


def check_a_summand_in_a_room_is_not_waited_for_and_stays(rank: int, world: int, folder: Path) -> None:
    size, by = 5000, shared(GroupTable(name="rooms"), ranks=(0, 1, 2))
    for number in range(3):
        place = by.place([size], torch.float32)
        assert place is not None
        place.value.copy_(torch.arange(size) + float(rank + number))
        under_way = by.sum(place if number else place.value)
        if rank == 1:  # reads once the others are past it, and have taken more room
            dist.barrier()
        assert torch.equal(under_way.wait(), 3.0 * torch.arange(size) + 3 * (1 + number))
        if rank != 1:
            del under_way, place
            others = [by.peers.room(4 * size) for _ in range(9)]
            for other in others:
                assert other is not None
                other.memory.fill_(7)
            dist.barrier()


def check_memory_that_is_given_is_waited_for(rank: int, world: int, folder: Path) -> None:
    table, ranks, x = GroupTable(name="given"), (0, 1, 2), torch.full((40, 30), float(rank))
    peers, ended, end = find_peers(table, ranks), [], exchanges.SharedExchange.end
    assert peers is not None

    def noted(self: Any) -> None:
        ended.append(self)
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges.SharedExchange, "end", noted)
        for given in (x, x.t()):
            for known, count in ((peers, 0), (replace(peers, area=None), 1)):
                while peers.standing:
                    peers.standing.pop().end()
                ended.clear()
                assert torch.equal(shared(table, None, ranks, known).sum(given).wait(), torch.full(given.shape, 3.0))
                assert len(ended) == count


def check_a_rank_without_rooms_reads_those_of_others(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="full")
    peers = find_peers(table, RANKS)
    assert peers is not None
    if rank == 1:  # has no place left, and says where its own stands
        peers = replace(peers, area=None)
    x = value(rank, torch.bfloat16)
    found = shared(table, None, RANKS, peers).sum(x).wait()
    assert torch.equal(found, flat(RANKS, table).sum(x).wait())


def check_two_ranks_of_which_one_gets_nothing_sum_what_is_copied_to_rooms(rank: int, world: int, folder: Path) -> None:
    table, ranks = GroupTable(name="two"), (1, 0)
    if rank in ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "LEAST_BYTES", 0)
            parts = [torch.full((size, 3), float(rank)).t() for size in (5, 0)]
            found = chosen(ranks, FLAT, table).scatter(parts).wait()
        assert torch.equal(found, torch.ones(3, 5 if rank == 1 else 0))


def check_pieces_are_taken_from_where_they_stand(rank: int, world: int, folder: Path) -> None:
    table, numels = GroupTable(name="pieces"), {2: (3, 100), 0: (), 1: (7,)}
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(system, "MOST_EXTENTS", 1 + number)
            pieces = [Flat(torch.full((numel,), rank + i / 8)) for i, numel in enumerate(numels[rank])]
            rooms = {other: [Flat(torch.empty(n)) for n in numels[other]] for other in RANKS if other != rank}
            sizes = [sum(numels[other]) for other in RANKS]
            shared(table, 70 + number).take(pieces, rooms, sizes).wait()
        for other, found in rooms.items():
            for i, room in enumerate(found):
                assert torch.equal(room.tensor, torch.full_like(room.tensor, other + i / 8))


def check_unlike_calls_are_refused(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="unlike")
    sizes = SIZES if rank == 1 else (*SIZES[1:], SIZES[0])
    with pytest.raises(DivergedError, match=f"rank {rank} asks for gather_segments of"):
        gather(shared(table, 60), value(rank, torch.float32), sizes).wait()


def check_a_rank_that_comes_late_is_waited_for_within_bounds(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="late", timeout=timedelta(seconds=0.3))
    by = shared(table, 0)
    sleep(0.05 if rank == 1 else 0.0)
    by.sum(value(rank, torch.float64)).wait()
    if rank != 1:  # which does not come again
        with pytest.raises(CommError, match="has not come within"):
            shared(table, 1).sum(value(rank, torch.float64)).wait()


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
