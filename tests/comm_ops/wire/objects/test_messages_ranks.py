"""Objects between processes: copies of what was told, of all sizes; what cannot be told is an error on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetu_fx
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0, from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.objects import messages
from hetu_fx.comm_ops.wire.objects.messages import FIRST_BYTES, gather
from hetu_fx.errors import CommError, OtherRankError, StateError
from hetu_fx.plans.plan import Plan

WORLD = 3
SIZES = (0, FIRST_BYTES - 100, FIRST_BYTES, FIRST_BYTES + 1, 300_000)


class Unknown:
    """Of no kind that is told."""


def check_objects_of_all_sizes_arrive(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    for size in SIZES:
        expected = [("x" * (size * other), {other: torch.full((other,), 0.5)}) for other in range(world)]
        for found, wanted in zip(all_gather_object(table, expected[rank]), expected, strict=True):
            assert str(found) == str(wanted)
        assert from_first(table, "x" * size if rank == 0 else None) == "x" * size
    plan = Plan.tensor_parallel((0, 1), (2, 1))
    assert broadcast_from_rank0(table, lambda: {"plan": plan}) == {"plan": plan}


def check_some_ranks_tell_each_other_in_the_order_of_their_group(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    if rank:
        assert gather(rank, table, table.group((2, 1)), (1, 2), "a test") == [1, 2]


def check_any_process_can_tell_the_others(rank: int, world: int, folder: Path) -> None:
    told = {"path": folder, "scores": [float("inf"), 0.1]}
    assert hetu_fx.broadcast_object(told if rank == 2 else Unknown(), 2) == told
    with pytest.raises(StateError, match="process 3 is to tell the others something; give one of 0 to 2"):
        hetu_fx.broadcast_object(told, 3)


def check_what_cannot_be_told_is_an_error_on_all(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    with pytest.raises(StateError, match=r"Unknown cannot be told.* at \['deep'\]\[1\]") as raised:
        all_gather_object(table, {"deep": [0, Unknown()]} if rank == 1 else "fine")
    assert isinstance(raised.value, OtherRankError) == (rank != 1)
    assert rank == 1 or "rank 1: StateError" in str(raised.value)
    with pytest.raises(StateError, match="Unknown cannot be told") as raised:
        from_first(table, Unknown())
    assert isinstance(raised.value, OtherRankError) == (rank != 0)
    assert all_gather_object(table, rank) == [0, 1, 2]  # nothing is left under way


def check_a_size_that_is_announced_is_bounded_before_memory_is_taken(rank: int, world: int, folder: Path) -> None:
    table = GroupTable()
    if rank == 2:  # is a stranger
        claim = torch.full((FIRST_BYTES,), 255, dtype=torch.uint8)
        dist.all_gather([torch.empty_like(claim) for _ in range(world)], claim)
    else:
        with pytest.raises(CommError, match=r"at most, and have announced: rank 0: .*, rank 2: 18446744073709551615"):
            all_gather_object(table, rank)
    dist.barrier()


def check_bytes_that_are_no_object_are_an_error(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(messages, "write", lambda value: b"\x80\x05cposix\nsystem\n")
        with pytest.raises(CommError, match="what rank 2 has told is"):
            all_gather_object(GroupTable(), rank)


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
