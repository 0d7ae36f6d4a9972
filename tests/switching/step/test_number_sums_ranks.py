"""Sums of one number: the same by rounds and by messages, and refused where ranks sum other things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.peers.mail import open_rounds
from hetu_fx.errors import DivergedError
from hetu_fx.switching.step.loss import start_marked_sum, start_sum_by_round

WORLD = 3


def check_numbers_are_summed_in_their_place(rank: int, world: int, folder: Path) -> None:
    by_messages, by_rounds = GroupTable(name="messages"), GroupTable(name="rounds")
    open_rounds(by_rounds)
    for table in (by_messages, by_rounds):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            number = torch.tensor(rank + 0.5, dtype=dtype)
            with using(table):
                start_marked_sum(number, table, "numbers").wait()
            assert number == 4.5


def check_unlike_sums_are_refused_however_they_go(rank: int, world: int, folder: Path) -> None:
    by_messages, by_rounds = GroupTable(name="unlike messages"), GroupTable(name="unlike rounds")
    open_rounds(by_rounds)
    for table in (by_messages, by_rounds):
        number, what = torch.tensor(1.0), "one" if rank == 1 else "other"
        with using(table), pytest.raises(DivergedError, match=f"rank {rank} asks for {what}"):
            start_marked_sum(number, table, what).wait()


def check_ranks_on_devices_of_several_types_send(rank: int, world: int, folder: Path) -> None:
    open_rounds(table := GroupTable(name="mixed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupTable, "is_mixed", True)
        assert start_sum_by_round(torch.tensor(1.0), table, "numbers") is None


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
