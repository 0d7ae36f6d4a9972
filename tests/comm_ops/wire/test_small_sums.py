"""Small messages look alike whatever they are for, and tell whether all ranks have sent them for the same."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from hetu_fx.comm_ops.wire.small_sums import MARKS, are_alike, pack_small_sum

SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
BY_OP = {SUM: torch.add, MAX: torch.maximum, MIN: torch.minimum}


def _reduced(values: list[torch.Tensor], op: dist.ReduceOp.RedOpType, what: list[str]) -> torch.Tensor:
    heads = [pack_small_sum(value, op, text)[0] for value, text in zip(values, what, strict=True)]
    return functools.reduce(BY_OP[op], heads)


@pytest.mark.parametrize("op", [SUM, MAX, MIN], ids=["sum", "max", "min"])
@pytest.mark.parametrize("size", [2, 3, 1000])
def test_messages_for_the_same_are_alike_and_others_are_not(op: dist.ReduceOp.RedOpType, size: int) -> None:
    values = [torch.tensor([rank + 0.5, float("nan")]) for rank in range(size)]
    same = _reduced(values, op, ["norm"] * size)
    assert are_alike(same[:MARKS].tolist(), op, size)
    other = _reduced(values, op, ["sum", *["norm"] * (size - 1)])
    assert not are_alike(other[:MARKS].tolist(), op, size)


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(3, dtype=torch.int32), torch.zeros(200)])
def test_all_messages_have_one_size(value: torch.Tensor) -> None:
    head, rest = pack_small_sum(value, SUM, "norm")
    assert head.nbytes == 512
    assert rest.numel() == max(0, value.numel() - head.numel() + MARKS)


def test_other_sizes_of_the_same_are_unlike() -> None:
    found = _reduced([torch.zeros(3), torch.zeros(4)], SUM, ["norm"] * 2)
    assert not are_alike(found[:MARKS].tolist(), SUM, 2)


def test_complex_numbers_travel_as_two() -> None:
    head, _ = pack_small_sum(torch.tensor(1 + 2j), SUM, "sum")
    assert head[MARKS : MARKS + 2].tolist() == [1.0, 2.0]


def test_what_other_kinds_of_numbers_look_like_is_unlike() -> None:
    assert not are_alike([float("nan"), 1.0], SUM, 2)
