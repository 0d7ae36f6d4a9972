"""What a rank notes of its writes and steps, and what is said where ranks have noted unlike things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.home import held, writes
from hetu_fx.switching.home.journal import Journal, journal
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.writes import Writes

WHOLE = torch.arange(12.0).view(6, 2)
ALIKE = StepFacts(rows=(1, 1), writes=(1.0, 1.0))


def home() -> Any:
    """Return a home tensor of one of two ranks."""
    return HomeTensor.from_full(WHOLE, home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 2), 0, 2))


@pytest.fixture
def noted() -> Writes:
    """Return what compares all that is noted from now on."""
    journal().next_round()
    table = GroupTable.dry(0, 2)
    return Writes(table, {}, Buffers(nn.Identity(), table))


def test_tensors_are_counted_once_a_round_however_often_they_are_written(noted: Writes) -> None:
    first, last = home(), home()
    torch._foreach_mul_([first, last], 0.5)
    first.add_(1)
    assert noted.written.tensors == 2
    journal().next_round()
    first.zero_()
    assert noted.written.tensors == 3
    noted.check(ALIKE)
    assert noted.written.tensors == 0


def test_plain_tensors_are_not_counted(noted: Writes) -> None:
    torch.zeros(6, 2).copy_(WHOLE)
    assert noted.written.tensors == 0


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
def test_numbers_that_are_written_with_are_noted(
    write: Callable[[Any], Any], numbers: list[float], noted: Writes
) -> None:
    write(home())
    assert noted.written.numbers == (numbers, [])


def test_whole_values_are_noted_by_their_signs(noted: Writes) -> None:
    home().copy_(WHOLE)
    (_, [sign]) = noted.written.numbers
    assert sign.norm == pytest.approx(float(WHOLE.norm()))
    noted.check(ALIKE)
    assert noted.written.numbers == ([], [])


def test_steps_of_optimizers_are_noted_by_their_numbers_and_their_writes_are_not(noted: Writes) -> None:
    parameter = nn.Parameter(home())
    parameter.grad = home()
    optimizer = torch.optim.Adam([parameter], lr=0.25)
    optimizer.step()
    ((group,),) = noted.written.rates
    assert dict(group)["lr"] == (0.25,)
    assert dict(group)["betas"] == (0.9, 0.999)
    assert noted.written.tensors == 0
    parameter.grad.mul_(2)
    assert noted.written.tensors == 1


def test_steps_by_the_same_numbers_are_held_once(noted: Writes) -> None:
    parameter = nn.Parameter(home())
    parameter.grad = home()
    optimizer = torch.optim.Adam([parameter], lr=0.25)
    for rate in (0.25, 0.25, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    first, second, third = noted.written.rates
    assert first is second
    assert first != third


def test_steps_of_plain_parameters_are_not_noted(noted: Writes) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert noted.written.rates == []


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
    assert dict(held.optimizer_rates(optimizer)[0])["lr"] == (0.5,)


RATES = ((("lr", (0.1,)), ("betas", (0.9, 0.99))),)
OTHER = ((("lr", (0.1,)), ("betas", (0.9, 0.5))),)


@pytest.mark.parametrize(
    ("problem_of", "told", "problem"),
    [
        (writes._unlike_rates, ([RATES], [RATES]), ""),
        (
            writes._unlike_rates,
            ([RATES, RATES], [RATES, OTHER]),
            "'betas': 0.9, 0.99 on rank 0, 0.9, 0.5 on rank 1",
        ),
        (writes._unlike_counts, (3, 3), ""),
        (writes._unlike_counts, (3, 5), "3, 5 tensors, by rank"),
        (writes._unlike_numbers, (([0.5], []), ([0.5 + 1e-7], [])), ""),
        (writes._unlike_numbers, (([float("nan")], []), ([float("nan")], [])), ""),
        (writes._unlike_numbers, (([0.5], []), ([2.0], [])), "the numbers 0.5, 2, by rank"),
    ],
    ids=["rates", "other rates", "counts", "other counts", "rounding", "nan", "other numbers"],
)
def test_what_is_unlike_is_told_by_rank(problem_of: Callable[[Any], str], told: Any, problem: str) -> None:
    found = problem_of(told)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_value_that_is_no_number_has_one_fingerprint(noted: Writes) -> None:
    home().copy_(WHOLE * torch.nan)
    assert noted.told == noted.told
