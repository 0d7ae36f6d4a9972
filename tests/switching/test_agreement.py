"""Inputs that all ranks must pass alike: told where they differ, with names and values, and how to mend it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.comm_ops.wire.consensus import StepFacts, all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import BatchError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.agreement import SameInputs, Summary, are_unlike, digest
from tests.ranks.outputs import Ranks


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), y, weight)


def batch(rows: int, *weight: float) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 6, generator=random),
        "weight": torch.tensor(weight, dtype=torch.float32),
        "y": torch.randint(0, 3, (rows,), generator=random),
    }


TWO = Plan.data_parallel((0, 1), (3, 1))


def test_inputs_without_rows_that_differ_between_ranks_are_told_by_name_and_value() -> None:
    with pytest.raises(BatchError, match=r"(?s)'weight' is \[1, 2, 3\].* on rank 0, \[1, 2, 4\].* on rank 1.*row_dims"):
        Ranks(TWO).call(Weighted(), [batch(4, 1, 2, 3), batch(2, 1, 2, 4)])


def test_equal_inputs_without_rows_are_no_matter() -> None:
    first, second = Ranks(TWO).call(Weighted(), [batch(4, 1, 2, 3), batch(2, 1, 2, 3)], calls=5)
    assert float(first) == float(second)


def test_unlike_batches_that_are_to_be_the_same_whole_one_are_told_by_name() -> None:
    with pytest.raises(BatchError, match=r"(?s)data='global' means the same whole batch.*'x' is .*hint: .*per_rank"):
        Ranks(TWO, shared=True).call(Weighted(), [batch(4, 1, 2, 3), {**batch(4, 1, 2, 3), "x": torch.ones(4, 6)}])


def compared(table: GroupTable) -> list[bool]:
    """Tell in which of 120 steps ranks with other inputs are told so; a rank goes on after the error."""
    same, found = SameInputs(table, shared=False), []
    for step in range(120):
        mine = {"weight": torch.tensor([1.0, float(table.rank and step >= 5)])}
        number = same.told("form", lambda mine=mine: mine)
        facts = StepFacts(inputs=tuple(all_gather_object(table, number)))
        try:
            same.check(facts, "form", lambda mine=mine: mine)
            found.append(False)
        except BatchError:
            found.append(True)
            same._batches["form"] += 1
    return found


def test_values_are_compared_at_the_first_steps_and_now_and_then() -> None:
    for found in run_in_threads(2, compared):
        assert [step for step, is_told in enumerate(found) if is_told] == [50, 100]


def test_a_digest_tells_values_shapes_and_dtypes_apart_and_not_memory() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert digest(x) == digest(x.clone().t().contiguous().t()) == digest(x + 0)
    others = [x + torch.eye(3, 4) * 1e-6, x.view(4, 3), x.double(), x.flip(0), x.roll(1)]
    assert len({digest(one) for one in (x, *others)}) == 1 + len(others)
    assert digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64])
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert digest(x) == digest(x.clone()) != digest(x.flip(0).roll(1))


def test_rounding_of_unlike_devices_is_no_difference_but_a_whole_number_is() -> None:
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))
    rounded = torch.nextafter(x, torch.ones(()))
    assert not are_unlike([Summary.of(x), Summary.of(rounded)])
    assert are_unlike([Summary.of(x), Summary.of(x * 1.001)])
    mask = torch.zeros(3).masked_fill(torch.tensor([False, True, False]), float("-inf"))
    assert are_unlike([Summary.of(mask), Summary.of(torch.zeros(3))])
    assert are_unlike([Summary.of(mask), Summary.of(mask.roll(1))])
    assert are_unlike([Summary.of(torch.tensor([5, 10**9])), Summary.of(torch.tensor([6, 10**9]))])


def test_inputs_of_unlike_sizes_are_left_to_what_fills_them_up() -> None:
    assert not are_unlike([Summary.of(torch.arange(5)), Summary.of(torch.arange(7))])
