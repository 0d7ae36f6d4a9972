"""What a rank notes of its writes and steps, and what is said where ranks have noted unlike things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home import stepped, writes
from hetu_fx.switching.home.journal import Journal, journal
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.writes import Numbers, StepRates, TensorCounts

WHOLE = torch.arange(12.0).view(6, 2)


def home() -> Any:
    """Return a home tensor of one of two ranks."""
    return HomeTensor.from_full(WHOLE, home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 2), 0, 2))


@pytest.fixture(autouse=True)
def _another_round() -> None:
    journal().next_round()


def test_tensors_are_counted_once_a_round_however_often_they_are_written() -> None:
    counts, first, last = TensorCounts(), home(), home()
    torch._foreach_mul_([first, last], 0.5)
    first.add_(1)
    assert counts.number == 2
    journal().next_round()
    first.zero_()
    assert counts.number == 3
    counts.settle()
    assert counts.number == 0


def test_plain_tensors_are_not_counted() -> None:
    counts = TensorCounts()
    torch.zeros(6, 2).copy_(WHOLE)
    assert counts.number == 0


@pytest.mark.parametrize(
    ("write", "numbers"),
    [
        (lambda it: it.mul_(0.5), [0.5]),
        (lambda it: it.add_(home(), alpha=3), [3.0]),
        (lambda it: torch._foreach_mul_([it], 2.0), [2.0]),
        (lambda it: it.zero_(), []),
    ],
    ids=["times", "alpha", "foreach", "zero"],
)
def test_numbers_that_are_written_with_are_noted(write: Callable[[Any], Any], numbers: list[float]) -> None:
    watch = Numbers()
    write(home())
    assert watch.detail == (numbers, [])


def test_whole_values_are_noted_by_their_signs() -> None:
    watch = Numbers()
    home().copy_(WHOLE)
    (_, [sign]) = watch.detail
    assert sign.norm == pytest.approx(float(WHOLE.norm()))
    watch.settle()
    assert watch.detail == ([], [])


def test_steps_of_optimizers_are_noted_by_their_numbers_and_their_writes_are_not() -> None:
    parameter = nn.Parameter(home())
    parameter.grad = home()
    optimizer = torch.optim.Adam([parameter], lr=0.25)
    rates, counts = StepRates(), TensorCounts()
    optimizer.step()
    ((group,),) = rates.detail
    assert dict(group)["lr"] == (0.25,)
    assert dict(group)["betas"] == (0.9, 0.999)
    assert counts.number == 0
    parameter.grad.mul_(2)
    assert counts.number == 1


def test_steps_by_the_same_numbers_are_held_once() -> None:
    parameter = nn.Parameter(home())
    parameter.grad = home()
    optimizer, rates = torch.optim.Adam([parameter], lr=0.25), StepRates()
    for rate in (0.25, 0.25, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    first, second, third = rates.detail
    assert first is second
    assert first != third


def test_steps_of_plain_parameters_are_not_noted() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    rates = StepRates()
    torch.optim.SGD([parameter], lr=0.1).step()
    assert rates.detail == []


def test_a_step_that_fails_lasts_to_the_end_of_its_round() -> None:
    journal = Journal()
    journal.begin_step(None)
    journal.write((home(),), {})
    assert journal.tensors == 0
    journal.next_round()
    journal.write((home(),), {})
    assert journal.tensors == 1


def test_a_rate_may_be_a_tensor() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    assert dict(stepped.rates_of(optimizer)[0])["lr"] == (0.5,)


RATES = ((("lr", (0.1,)), ("betas", (0.9, 0.99))),)
OTHER = ((("lr", (0.1,)), ("betas", (0.9, 0.5))),)


@pytest.mark.parametrize(
    ("watch", "told", "problem"),
    [
        (StepRates, ([RATES], [RATES]), ""),
        (StepRates, ([RATES, RATES], [RATES, OTHER]), "unlike 'betas': 0.9, 0.99 on rank 0, 0.9, 0.5 on rank 1"),
        (TensorCounts, (3, 3), ""),
        (TensorCounts, (3, 5), "3, 5 tensors, by rank"),
        (Numbers, (([0.5], []), ([0.5 + 1e-7], [])), ""),
        (Numbers, (([float("nan")], []), ([float("nan")], [])), ""),
        (Numbers, (([0.5], []), ([2.0], [])), "the numbers 0.5, 2, by rank"),
    ],
    ids=["rates", "other rates", "counts", "other counts", "rounding", "nan", "other numbers"],
)
def test_what_is_unlike_is_told_by_rank(watch: type[Any], told: tuple[Any, ...], problem: str) -> None:
    found = watch().problem(told)
    assert problem in found
    assert bool(found) == bool(problem)


def test_numbers_have_the_same_hash_in_every_process() -> None:
    assert writes.clean(float("nan")) == writes.clean(float("nan"))
