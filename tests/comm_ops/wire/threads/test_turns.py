"""Threads that take turns: in an order that is always the same, and with a word where none can go on."""

import pytest

from hetu_fx.comm_ops.wire.threads.turns import RoundRobin
from hetu_fx.errors import DivergedError, StateError


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
