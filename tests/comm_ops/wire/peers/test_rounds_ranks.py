"""Rounds: every rank hears what all have said, whoever has ended since, and unlike ones are told apart."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers import mail, memory
from hetu_fx.comm_ops.wire.peers.mail import MOST_NUMBERS, RING, SharedRounds, open_rounds
from hetu_fx.comm_ops.wire.peers.memory import Peers
from hetu_fx.comm_ops.wire.small_sums import reduce_small
from hetu_fx.errors import CommError, DivergedError

WORLD = 3


def opened(name: str, seconds: float | None = None) -> SharedRounds:
    table = GroupTable(name=name, timeout=None if seconds is None else timedelta(seconds=seconds))
    open_rounds(table)
    assert isinstance(table.rounds, SharedRounds)
    return table.rounds


def check_all_hear_what_all_say(rank: int, world: int, folder: Path) -> None:
    table = opened("all")
    for count in (0, 1, 7, MOST_NUMBERS):
        numbers = [rank + i / 8 for i in range(count)]
        said = table.say(numbers, "numbers")
        said.wait()
        assert [list(one) for one in said.heard] == [[r + i / 8 for i in range(count)] for r in range(world)]


def check_numbers_arrive_bit_for_bit(rank: int, world: int, folder: Path) -> None:
    special = [math.nan, math.inf, -0.0, 5e-324, 2.0**53 - 1, 0.1]
    (said := opened("bits").say(special, "bits")).wait()
    for heard in said.heard:
        assert torch.tensor(heard, dtype=torch.float64).numpy().tobytes() == (
            torch.tensor(special, dtype=torch.float64).numpy().tobytes()
        )


def check_rounds_may_be_heard_late_and_in_any_order(rank: int, world: int, folder: Path) -> None:
    table = opened("late")
    said = [table.say([float(number + rank)], "numbers") for number in range(10 * RING)]
    for number, one in reversed(list(enumerate(said))):
        one.wait()
        assert one.heard == [(float(number + other),) for other in range(world)]


def check_a_slow_rank_misses_nothing(rank: int, world: int, folder: Path) -> None:
    table, said = opened("slow"), []
    for number in range(3 * RING):
        said.append(table.say([float(number)], "numbers"))
        sleep(0.002 if rank == 1 and number % RING == 5 else 0)
    for number, one in enumerate(said):
        one.wait()
        assert one.heard == [(float(number),)] * world


def check_nobody_says_more_than_half_a_ring_before_others_have(rank: int, world: int, folder: Path) -> None:
    table = opened("half", seconds=0.3)
    if rank == 0:
        for _ in range(RING // 2):
            table.say([0.0], "numbers")
        with pytest.raises(CommError, match=r"numbers of ranks \[0, 1, 2\] failed on rank 0: .*has not come within"):
            table.say([0.0], "numbers")


def check_unlike_rounds_are_refused_on_all_ranks(rank: int, world: int, folder: Path) -> None:
    what = "the loss" if rank == 1 else "the norm"
    said = opened("unlike").say([1.0], what)
    with pytest.raises(DivergedError, match=f"rank {rank} asks for {what}"):
        said.wait()


def check_other_counts_of_the_same_are_unlike(rank: int, world: int, folder: Path) -> None:
    said = opened("counts").say([1.0] * (1 + (rank == 1)), "numbers")
    with pytest.raises(DivergedError, match=f"rank {rank} asks for numbers"):
        said.wait()


def check_who_does_not_look_does_not_wait(rank: int, world: int, folder: Path) -> None:
    table = opened("look")
    if rank > 0:
        dist.barrier()
    said = table.say([1.0], "numbers")
    if rank == 0:
        assert not said.is_completed()
        dist.barrier()
    said.wait()
    assert said.is_completed()


def check_what_is_taken_back_was_not_said(rank: int, world: int, folder: Path) -> None:
    table = opened("taken back")
    if rank == 0:
        for _ in range(3 * RING):
            said = table.say([-1.0], "a question")
            assert not said.is_completed()
            said.take_back()
    dist.barrier()
    (said := table.say([float(rank)], "numbers")).wait()
    assert said.heard == [(float(other),) for other in range(world)]


def check_too_many_numbers_are_refused(rank: int, world: int, folder: Path) -> None:
    with pytest.raises(CommError, match="norms is of 129 numbers, more than the 128"):
        opened("many").say([0.0] * (MOST_NUMBERS + 1), "norms")


def check_what_is_half_written_is_not_heard(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        table = opened("torn")
        patch.setattr(mail, "crc32", lambda body, start=None: rank if start is not None else zlib.crc32(body))
        said = table.say([1.0], "numbers")
        dist.barrier()
        patch.undo()
        assert not said.is_completed()


def check_what_a_process_has_said_is_heard_after_it_has_gone(rank: int, world: int, folder: Path) -> None:
    table = opened("gone")
    first = table.say([float(rank)], "numbers")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "lives", lambda peers, other: False)
        first.wait()
        assert first.heard == [(float(other),) for other in range(world)]
        if rank == 0:
            with pytest.raises(RuntimeError, match="process of rank 1 has gone"):
                table.say([0.0], "numbers").wait()


def check_a_process_is_looked_for_by_its_number(rank: int, world: int, folder: Path) -> None:
    found = memory.find_peers(table := GroupTable(name="looked for"), (0, 1, 2))
    assert found is not None
    gone, other = replace(found, processes=dict.fromkeys(range(WORLD), 2**22 + os.getpid())), (rank + 1) % world
    assert found.lives(other)
    assert gone.until(lambda: None, other, table, "gone") == "gone"
    assert gone.until(lambda: "said", other, table, "gone") == "said"
    with pytest.raises(RuntimeError, match=f"process of rank {other} has gone"):
        gone.until(lambda: None, other, table)


def check_where_one_cannot_map_it_nobody_has_rounds(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(memory, "map_remote_memory", lambda *what, **options: None)
        open_rounds(table := GroupTable(name="unmapped"))
        assert table.rounds is None


def check_where_one_has_no_memory_nobody_has_rounds(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(memory, "shared_memory", lambda num_bytes: None)
        open_rounds(table := GroupTable(name="full"))
        assert table.rounds is None


def check_small_tensors_are_reduced_as_by_messages(rank: int, world: int, folder: Path) -> None:
    by_messages, by_rounds = GroupTable(name="reduced messages"), GroupTable(name="reduced rounds")
    open_rounds(by_rounds)
    sign = -1 if rank == 1 else 1
    values = [
        torch.full((3, 2), rank + 0.5, dtype=torch.bfloat16),
        torch.tensor([sign * (2**62 // 3 - rank), sign * 7, 0]),
        torch.tensor([rank > 0, False]),
        torch.tensor(rank + 1j),
        torch.arange(200.0) * sign,
        torch.zeros(0),
        torch.zeros(0, dtype=torch.int64),
    ]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for value in values:
            if value.is_complex() and op != dist.ReduceOp.SUM:
                continue
            found = [reduce_small(value.clone(), op, table, "values") for table in (by_messages, by_rounds)]
            assert torch.equal(*found), (op, value, found)


def check_reductions_of_other_sizes_are_unlike(rank: int, world: int, folder: Path) -> None:
    open_rounds(table := GroupTable(name="other sizes"))
    with pytest.raises(DivergedError, match=f"rank {rank} asks for values"):
        reduce_small(torch.zeros(100 + (rank == 1)), dist.ReduceOp.SUM, table, "values")


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
