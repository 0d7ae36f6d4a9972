"""Messages between ranks that are threads: the wire's own functions on them, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from hetu_fx.comm_ops.wire.collectives import FlatCollectives, PaddedCollectives, reduce_world, sum_all
from hetu_fx.comm_ops.wire.consensus import (
    LocalFacts,
    agree,
    all_gather_object,
    broadcast_from_rank0,
    raise_on_all_ranks,
)
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.comm_ops.wire.threads import RoundRobin, run_in_threads
from hetu_fx.errors import CommError, DivergedError, StateError
from tests.comm_ops.at_once import flat, gather_in_place


def test_one_runs_until_it_waits_and_then_the_next_in_the_circle():
    turns, told, there = RoundRobin(), [], set()

    def work(number):
        told.append(("comes", number))
        there.add(number)
        turns.wait_until(lambda: len(there) == 3, "the others")
        told.append(("goes", number))
        return number * 10

    assert turns.run([lambda number=number: work(number) for number in range(3)]) == [0, 10, 20]
    assert told == [("comes", 0), ("comes", 1), ("comes", 2), ("goes", 2), ("goes", 0), ("goes", 1)]


def test_where_nobody_can_go_on_it_is_told_what_each_waits_for():
    turns = RoundRobin()

    def work(number):
        if number < 2:
            turns.wait_until(lambda: False, f"a thing of {number}")

    with pytest.raises(DivergedError) as raised:
        turns.run([lambda number=number: work(number) for number in range(3)])
    assert str(raised.value) == (
        "no rank can go on:\n  rank 0 waits for a thing of 0\n  rank 1 waits for a thing of 1\n  rank 2 has ended"
    )


def test_the_error_of_the_rank_that_had_it_is_raised_not_those_of_ranks_that_waited_for_it():
    turns = RoundRobin()

    def work(number):
        if number == 1:
            raise StateError("a problem")
        turns.wait_until(lambda: False, "rank 1")

    with pytest.raises(StateError, match="a problem"):
        turns.run([lambda number=number: work(number) for number in range(3)])


def test_what_has_caught_the_word_that_none_can_go_on_may_end_well():
    turns = RoundRobin()

    def work(number):
        with pytest.raises(DivergedError):
            turns.wait_until(lambda: False, "nothing")
        return number

    assert turns.run([lambda: work(1), lambda: work(2)]) == [1, 2]


def test_a_thread_that_begins_to_wait_when_the_time_is_over_gives_up_for_all():
    turns = RoundRobin()
    turns.seconds = 0.0

    def work(number):
        turns.wait_until(lambda: number < 0, "a thing that never comes")

    with pytest.raises(TimeoutError, match=r"given up after 0.0 s"):
        turns.run([lambda number=number: work(number) for number in range(2)])


def own(table, size=4):
    return torch.arange(size, dtype=torch.float64) + 10 * table.rank


def test_every_rank_has_its_table_and_ops_find_it():
    assert run_in_threads(3, lambda table: (table.rank, table.size, active() is table)) == [
        (0, 3, True),
        (1, 3, True),
        (2, 3, True),
    ]
    assert active().size == 1


@pytest.mark.parametrize("world", [2, 3, 64])
def test_a_sum_is_the_same_on_all(world):
    found = run_in_threads(world, lambda table: flat(range(world), table).sum(own(table)).wait())
    expected = world * torch.arange(4.0, dtype=torch.float64) + 10 * sum(range(world))
    assert all(torch.equal(one, expected) for one in found)


def test_large_tensors_of_several_ranks_are_summed_by_the_collective():
    size = 1 << 18
    found = run_in_threads(3, lambda table: flat(range(3), table).sum(torch.full((size,), 1.0 + table.rank)).wait())
    assert all(torch.equal(one, torch.full((size,), 6.0)) for one in found)


def test_unequal_parts_are_gathered_and_scattered_in_a_group_in_any_order():
    ranks, shapes = (3, 1), ((2,), (5,))

    def work(table):
        if table.rank not in ranks:
            return None
        here = table.position(ranks)
        for by in (FlatCollectives(ranks, table), PaddedCollectives(ranks, table)):
            gathered = by.gather(torch.full(shapes[here], float(table.rank)), shapes).wait()
            assert torch.equal(torch.cat(gathered), torch.tensor([3.0] * 2 + [1.0] * 5))
            part = by.scatter([torch.full(shape, float(table.rank)) for shape in shapes]).wait()
            assert torch.equal(part, torch.full(shapes[here], 4.0))
        return here

    assert run_in_threads(4, work) == [None, 1, None, 0]


def test_buffers_and_exchanges_of_parts():
    def work(table):
        buffer = torch.tensor([1.0, 2.0, 3.0]) * (table.rank + 1)
        exchange = FlatCollectives((0, 1), active(), 0).scatter(buffer.split((1, 2)))
        exchange.wait()
        assert torch.equal(buffer[:1] if table.rank == 0 else buffer[1:], torch.tensor([[3.0], [6.0, 9.0]][table.rank]))
        gather_in_place(buffer, (1, 2), (0, 1)).wait()
        assert buffer.tolist() == [3.0, 6.0, 9.0]
        sum_all(Flat(buffer), (0, 1)).wait()
        assert buffer.tolist() == [6.0, 12.0, 18.0]
        parts = [torch.full((2,), 10.0 * table.rank + to) for to in range(2)]
        return [part.tolist() for part in flat((0, 1), table).exchange(parts, [(2,), (2,)]).wait()]

    assert run_in_threads(2, work) == [[[0.0] * 2, [10.0] * 2], [[1.0] * 2, [11.0] * 2]]


def test_ranks_agree_by_small_messages():
    def work(table):
        highest = reduce_world(torch.tensor([float(table.rank)]), 5, dist.ReduceOp.MAX, "a number")
        facts = agree(table, LocalFacts(rows=table.rank, signature="same"))
        told = broadcast_from_rank0(table, lambda: ["of", table.rank])
        return float(highest), facts.rows, told, all_gather_object(table, table.rank)

    assert run_in_threads(5, work) == [(4.0, (0, 1, 2, 3, 4), ["of", 0], [0, 1, 2, 3, 4])] * 5


def test_objects_are_copies():
    shared = ["mine"]
    found = run_in_threads(2, lambda table: all_gather_object(table, shared))
    assert all(one is not shared for values in found for one in values)


def test_an_object_that_cannot_be_told_is_an_error_on_all():
    seen = []

    def work(table):
        try:
            all_gather_object(table, object() if table.rank == 1 else "fine")
        except StateError as error:
            seen.append(type(error).__name__)

    run_in_threads(3, work)
    assert sorted(seen) == ["OtherRankError", "OtherRankError", "StateError"]


def test_an_error_of_one_rank_is_raised_on_all_as_among_processes():
    seen = []

    def work(table):
        def act():
            if table.rank == 1:
                raise StateError("a problem")

        try:
            raise_on_all_ranks(table, act)
        except StateError as error:
            seen.append(str(error))

    run_in_threads(3, work)
    assert sorted(seen) == ["a problem"] + ["another rank failed: rank 1: StateError: a problem"] * 2


def test_a_message_leaves_when_its_receive_is_posted_as_with_gloo():
    def work(table):
        x = torch.full((2,), 1.0)
        if table.rank == 0:
            sent = post([], [(1, x, Tag.SLICES)], table)
            x.fill_(7.0)
            sent.wait()
            return None
        post([(0, x, Tag.SLICES)], [], table).wait()
        return x.tolist()

    assert run_in_threads(2, work) == [None, [7.0, 7.0]]


def test_unlike_calls_are_told_by_rank_and_call():
    def work(table):
        if table.rank == 2:
            return flat(range(3), table).gather(own(table), [(4,)] * 3).wait()
        return sum_all(Flat(own(table)), range(3)).wait()

    with pytest.raises(DivergedError) as raised:
        run_in_threads(3, work)
    assert str(raised.value) == (
        "unlike calls, number 1 of ranks [0, 1, 2]:\n"
        "  rank 0: all_reduce of 4 of torch.float64, RedOpType.SUM\n"
        "  rank 1: all_reduce of 4 of torch.float64, RedOpType.SUM\n"
        "  rank 2: broadcast of 4 of torch.float64 from rank 0"
    )


@pytest.mark.parametrize("other", [lambda x: x[:3], lambda x: x.float()], ids=["another size", "another dtype"])
def test_sums_of_other_sizes_or_dtypes_are_refused(other):
    with pytest.raises(DivergedError, match="unlike calls, number 1 of ranks"):
        run_in_threads(2, lambda table: sum_all(Flat(own(table) if table.rank else other(own(table))), (0, 1)).wait())


def test_messages_of_other_sizes_are_refused():
    with pytest.raises(DivergedError, match=r"from rank 0 to rank 1 .* is sent as 3 of .* and awaited as 4 of"):
        run_in_threads(2, lambda table: flat((0, 1), table).sum(own(table, 3 + table.rank)).wait())


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(DivergedError) as raised:
        run_in_threads(3, lambda table: None if table.rank == 1 else sum_all(Flat(own(table)), range(3)).wait())
    assert "rank 0 waits for ranks [1] in call 1 of ranks [0, 1, 2], all_reduce of 4" in str(raised.value)
    assert "rank 1 has ended" in str(raised.value)


def test_a_message_that_nobody_receives_is_told_at_the_end():
    def work(table):
        if table.rank == 0:
            post([], [(1, own(table), Tag.SLICES)], table)

    with pytest.raises(CommError, match=r"1 from rank 0 to rank 1 with tag 0x4253 .* never received"):
        run_in_threads(2, work)
