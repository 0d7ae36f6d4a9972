"""Ranks that read each other's memory get what messages bring, bit for bit; who cannot read, sends."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetu_fx.comm_ops.plans.algorithm import FLAT
from hetu_fx.comm_ops.wire.collectives import gather_segments, reduce_parts, sum_segments, sum_tensor
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.peers import exchanges, memory
from hetu_fx.comm_ops.wire.peers.exchanges import (
    Act,
    begin_sum_read,
    gather_pieces,
    gather_read,
    room_of_summand,
    run_gather_segments,
    run_sum_all,
    run_sum_segments,
    start_exchange,
)
from hetu_fx.comm_ops.wire.peers.memory import Peers, Record, SharedMailbox, find_peers
from hetu_fx.comm_ops.wire.two_level import all_gather_two_level, all_reduce_two_level, reduce_scatter_two_level
from hetu_fx.errors import CommError, DivergedError

WORLD = 3
RANKS = 2, 0, 1  # not in the order of the group
SIZES = 1000, 0, 513
DTYPES = torch.float32, torch.bfloat16, torch.float64


def value(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(SIZES), generator=generator, dtype=torch.float64).to(dtype)


def read(act: Act, buffer: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Do an exchange by reading, in chunks of a few elements."""
    table = GroupTable(name=f"readers {number}")
    peers = find_peers(table, RANKS)
    assert peers is not None
    with using(table):
        start_exchange(act, Flat(buffer), SIZES, RANKS, number, table, peers).wait()
    return buffer


def check_sums_have_the_bits_of_those_that_are_sent(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "CHUNK_BYTES", 200)
        for number, dtype in enumerate(DTYPES):
            here = RANKS.index(rank)
            sent, table = value(rank, dtype), GroupTable(name=f"senders {dtype}")
            with using(table):
                sum_segments(Flat(sent), SIZES, RANKS).wait()
            found = read(run_sum_segments, value(rank, dtype), 10 + number)
            assert torch.equal(found.split(SIZES)[here], sent.split(SIZES)[here])


def check_exchanges_of_one_number_may_be_under_way_together(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="together")
    peers = find_peers(table, RANKS)
    assert peers is not None
    buffers = [value(rank, torch.float64) * factor for factor in (1, 2, 3)]
    with using(table):
        begun = [start_exchange(run_sum_all, Flat(buffer), SIZES, RANKS, 5, table, peers) for buffer in buffers]
        for exchange in begun:
            exchange.wait()
    expected = value(0, torch.float64) + value(1, torch.float64) + value(2, torch.float64)
    for factor, buffer in zip((1, 2, 3), buffers, strict=True):
        torch.testing.assert_close(buffer, factor * expected, rtol=1e-12, atol=1e-12)


def check_too_many_of_one_number_are_refused_until_some_have_ended(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="many")
    peers = find_peers(table, RANKS)
    assert peers is not None
    with using(table):
        begun = [
            start_exchange(run_sum_all, Flat(value(rank, torch.float64)), SIZES, RANKS, 0, table, peers)
            for _ in range(exchanges.AT_ONCE)
        ]
        with pytest.raises(CommError, match=r"more than 32 exchanges 1 .* end one before the next"):
            start_exchange(run_sum_all, Flat(value(rank, torch.float64)), SIZES, RANKS, 0, table, peers)
    del begun


def check_a_sum_that_stands_ends_when_its_number_has_come_round(rank: int, world: int, folder: Path) -> None:
    table, x = GroupTable(name="round"), torch.full((3,), float(rank))
    peers = find_peers(table, RANKS)
    assert peers is not None
    for _ in range(2):
        place = room_of_summand([3], x.dtype, peers)
        assert place is not None
        place.value.copy_(x)
        assert begin_sum_read(place, RANKS, table, peers).end().tolist() == [3.0] * 3
        for _ in range(exchanges.AT_ONCE):  # none of these stands
            assert [part[0] for part in gather_read(x, [(3,)] * 3, RANKS, table, peers)] == list(RANKS)


def check_a_sum_of_all_is_the_same_everywhere(rank: int, world: int, folder: Path) -> None:
    for number, dtype in enumerate(DTYPES):
        found = read(run_sum_all, value(rank, dtype), 20 + number)
        expected = value(0, dtype) + value(1, dtype) + value(2, dtype)
        assert torch.equal(found, expected)


def check_segments_are_gathered(rank: int, world: int, folder: Path) -> None:
    sent, table = value(rank, torch.float32), GroupTable(name="gathers")
    with using(table):
        gather_segments(Flat(sent), SIZES, RANKS).wait()
    assert torch.equal(read(run_gather_segments, value(rank, torch.float32), 30), sent)


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
            assert torch.equal(all_reduce_two_level(x, ranks, FLAT, table), sum_tensor(x, ranks, table))
            parts = x.split([size - 9, 0, 9])
            assert torch.equal(reduce_scatter_two_level(parts, ranks, FLAT, table), reduce_parts(parts, ranks, table))
            apart = [part.clone() for part in parts]
            assert torch.equal(reduce_scatter_two_level(apart, ranks, FLAT, table), reduce_parts(parts, ranks, table))
            assert torch.equal(x, before)
            assert bool(read) == (size == 1000)


def check_a_gather_of_uneven_parts_reads_them(rank: int, world: int, folder: Path) -> None:
    table, ranks, shapes = GroupTable(name="uneven"), (0, 1, 2), [[5, 7], [0, 7], [1, 7]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LEAST_BYTES", 0)
        x = torch.full(shapes[rank], float(rank))
        gathered = all_gather_two_level(x, shapes, ranks, FLAT, table)
        for sender, (part, shape) in enumerate(zip(gathered, shapes, strict=True)):
            assert torch.equal(part, torch.full(shape, float(sender)))


def check_exchanges_may_be_under_way_together(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="together")
    peers = find_peers(table, RANKS)
    assert peers is not None
    buffers = [value(rank, torch.float64) for _ in range(3)]
    with using(table):
        started = [start_exchange(run_sum_all, Flat(b), SIZES, RANKS, i, table, peers) for i, b in enumerate(buffers)]
        for exchange in started:
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
            patch.setattr(memory, "_copy", forbidden)
        assert find_peers(GroupTable(name="forbidden"), (0, 1, 2)) is None


def check_a_process_that_has_gone_is_named(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="gone")
    peers = find_peers(table, (0, 1, 2))
    assert peers is not None
    gone = replace(peers, processes=dict.fromkeys(range(WORLD), 2**22 + os.getpid()), areas={})
    with using(table), pytest.raises(CommError, match=r"process of rank \d has gone"):
        start_exchange(run_gather_segments, Flat(torch.zeros(10)), (4, 4, 2), (0, 1, 2), 40, table, gone).wait()


def check_who_ends_after_the_last_exchange_is_not_missed(rank: int, world: int, folder: Path) -> None:
    table, look = GroupTable(name="ends"), SharedMailbox.look
    peers = find_peers(table, RANKS)
    assert peers is not None

    def has_read(slot: int) -> bool:
        return peers.own.stamp(slot) % 3 == 0

    def silent_then(self: SharedMailbox, slot: int) -> Record:
        return Record(0) if has_read(slot) else look(self, slot)

    with pytest.MonkeyPatch.context() as patch:
        exchange = start_exchange(run_gather_segments, Flat(value(rank, torch.float32)), SIZES, RANKS, 0, table, peers)
        slot = next(iter(peers.under_way))
        patch.setattr(SharedMailbox, "look", silent_then)
        patch.setattr(Peers, "lives", lambda peers, other: not has_read(slot))
        with using(table):
            exchange.wait()


def check_a_summand_in_a_room_is_not_waited_for_and_stays(rank: int, world: int, folder: Path) -> None:
    table, ranks, size = GroupTable(name="rooms"), (0, 1, 2), 5000
    peers = find_peers(table, ranks)
    assert peers is not None
    for number in range(3):
        place = room_of_summand([size], torch.float32, peers)
        assert place is not None
        place.value.copy_(torch.arange(size) + float(rank + number))
        under_way = begin_sum_read(place if number else place.value, ranks, table, peers)
        if rank == 1:  # reads once the others are past it, and have taken more room
            dist.barrier()
        assert torch.equal(under_way.end(), 3.0 * torch.arange(size) + 3 * (1 + number))
        if rank != 1:
            del under_way, place
            others = [peers.room(4 * size) for _ in range(9)]
            for other in others:
                assert other is not None
                other.memory.fill_(7)
            dist.barrier()


def check_memory_that_is_given_is_waited_for(rank: int, world: int, folder: Path) -> None:
    table, ranks, x = GroupTable(name="given"), (0, 1, 2), torch.full((40, 30), float(rank))
    peers, ended, end = find_peers(table, ranks), [], exchanges._Reading.end
    assert peers is not None

    def noted(self: Any) -> None:
        ended.append(self)
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges._Reading, "end", noted)
        for given in (x, x.t()):
            for known, count in ((peers, 0), (replace(peers, area=None), 1)):
                exchanges._standing.end()
                ended.clear()
                assert torch.equal(begin_sum_read(given, ranks, table, known).end(), torch.full(given.shape, 3.0))
                assert len(ended) == count


def check_a_rank_without_rooms_reads_those_of_others(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="full")
    peers = find_peers(table, RANKS)
    assert peers is not None
    if rank == 1:  # has no place left, and says where its own stands
        peers = replace(peers, area=None)
    x = value(rank, torch.bfloat16)
    found = begin_sum_read(x, RANKS, table, peers).end()
    assert torch.equal(found, sum_tensor(x, RANKS, table))


def check_two_ranks_of_which_one_gets_nothing_sum_what_is_copied_to_rooms(rank: int, world: int, folder: Path) -> None:
    table, ranks = GroupTable(name="two"), (1, 0)
    if rank in ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "LEAST_BYTES", 0)
            parts = [torch.full((size, 3), float(rank)).t() for size in (5, 0)]
            found = reduce_scatter_two_level(parts, ranks, FLAT, table)
        assert torch.equal(found, torch.ones(3, 5 if rank == 1 else 0))


def check_pieces_are_taken_from_where_they_stand(rank: int, world: int, folder: Path) -> None:
    table, numels = GroupTable(name="pieces"), {2: (3, 100), 0: (), 1: (7,)}
    peers, by = find_peers(table, RANKS), memory._copied_at_once
    assert peers is not None
    for number, most in enumerate((None, 0, 20)):  # bytes after which the system is said to stop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_MOST_EXTENTS", 1 + number)
            if most is not None:
                patch.setattr(memory, "_copied_at_once", lambda *what, most=most: min(most, by(*what)))
            pieces = [Flat(torch.full((numel,), rank + i / 8)) for i, numel in enumerate(numels[rank])]
            rooms = {other: [Flat(torch.empty(n)) for n in numels[other]] for other in RANKS if other != rank}
            sizes = [sum(numels[other]) for other in RANKS]
            gather_pieces(pieces, rooms, sizes, RANKS, 70 + number, table, peers).wait()
        for other, found in rooms.items():
            for i, room in enumerate(found):
                assert torch.equal(room.tensor, torch.full_like(room.tensor, other + i / 8))


def check_unlike_calls_are_refused(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="unlike")
    peers = find_peers(table, RANKS)
    assert peers is not None
    sizes = SIZES if rank == 1 else (*SIZES[1:], SIZES[0])
    with using(table), pytest.raises(DivergedError, match=f"rank {rank} asks for gather_segments of"):
        start_exchange(run_gather_segments, Flat(value(rank, torch.float32)), sizes, RANKS, 60, table, peers).wait()


def check_a_rank_that_comes_late_is_waited_for_within_bounds(rank: int, world: int, folder: Path) -> None:
    table = GroupTable(name="late", timeout=timedelta(seconds=0.3))
    peers = find_peers(table, RANKS)
    assert peers is not None
    with using(table):
        sleep(0.05 if rank == 1 else 0.0)
        start_exchange(run_sum_all, Flat(value(rank, torch.float64)), SIZES, RANKS, 0, table, peers).wait()
        if rank != 1:  # which does not come again
            with pytest.raises(CommError, match="has not come within"):
                start_exchange(run_sum_all, Flat(value(rank, torch.float64)), SIZES, RANKS, 1, table, peers).wait()


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
