"""What is remembered of captures is used for equal models only."""

from __future__ import annotations

import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.program import tracer
from hetu_fx.program.captures import Programs
from tests.ranks.capture_store import FOLDER


class Net(nn.Module):
    """A layer, a buffer that the forward writes, and a number that it reads."""

    def __init__(self, factor: float, kind: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.norm, self.act, self.factor = nn.BatchNorm1d(4), kind(), factor

    def forward(self, x: Tensor) -> Tensor:
        return (self.act(self.norm(x)) * self.factor).mean()


BATCH = {"x": torch.randn(6, 4)}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Programs, int]]:
    """Give what finds the program of a model; and how many captures there have been by then."""
    count, capture = 0, tracer.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return capture(*args, **kwargs)

    monkeypatch.setattr(tracer, "capture", counted)
    monkeypatch.setattr("tests.ranks.remembered._known", {})
    monkeypatch.delenv(FOLDER, raising=False)  # nothing comes from other processes

    def of(model: nn.Module) -> tuple[Programs, int]:
        made = Programs(model, None)
        made.first(BATCH, True)
        return made, count

    return of


def test_equal_models_are_captured_once(programs: Any) -> None:
    one, first = programs(Net(2.0))
    other, both = programs(Net(2.0))
    assert (first, both) == (1, 1)
    assert one.current is not other.current
    assert one.current.graph is other.current.graph


class Called(nn.Module):
    """Calls a function that it was given, on a tensor that it has."""

    def __init__(self, function: Callable[[Tensor], Tensor], number: float = 1.0) -> None:
        super().__init__()
        self.layer, self.function, self.numbers = nn.Linear(4, 4), function, torch.full((4,), number)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x) * self.numbers)


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.mean() * by


@pytest.mark.parametrize(
    "unlike",
    [
        Called(lambda x: x.sum()),
        Called(lambda x: x.prod()),
        Called(scaled(2.0)),
        Called(scaled(3.0)),
        Called(scaled(2.0), 3.0),
        Called(torch.sum),
        Called(torch.mean),
        Called(partial(torch.mean, dim=(1, 0))),
        Called(partial(torch.amax, dim=(0, 1))),
    ],
)
def test_functions_and_tensors_that_it_reads_count_too(programs: Any, unlike: nn.Module) -> None:
    known = (lambda x: x.mean()), scaled(4.0), scaled(2.0), partial(torch.mean, dim=(0, 1))
    for number, like in enumerate(map(Called, known, (1.0, 1.0, 2.0, 1.0)), 1):
        assert programs(like)[1] == number
    assert programs(unlike)[1] == 5
    assert programs(unlike)[1] == 5, "now it is known"


@pytest.mark.parametrize("unlike", [Net(3.0), Net(2.0, nn.Sigmoid), Net(2.0).double(), Net(2.0).requires_grad_(False)])
def test_a_model_that_is_not_equal_is_captured(programs: Any, unlike: nn.Module) -> None:
    one, _ = programs(Net(2.0))
    other, both = programs(unlike)
    assert both == 2
    assert one.current.graph is not other.current.graph


def test_what_the_model_depends_on_is_its_own(programs: Any) -> None:
    programs(Net(2.0))
    model = Net(2.0)
    made, _ = programs(model)
    program = made.current
    assert made.holds(program)
    model.factor = 3.0
    assert not made.holds(program)
    made.first(BATCH, True)
    assert made.current is not program


def test_buffers_stay_as_they_are(programs: Any) -> None:
    programs(Net(2.0))
    model = Net(2.0)
    programs(model)
    assert int(model.norm.num_batches_tracked) == 0
    assert not model.norm.running_mean.any()


class Scaled(nn.Module):
    """Reads a number in an array, which may change in place."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.layer, self.array = nn.Linear(4, 4), array.array("d", [number])

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.array[0]).sum()


def test_what_arrays_hold_counts(programs: Any) -> None:
    assert [programs(Scaled(number))[1] for number in (2.0, 2.0, 3.0)] == [1, 1, 2]


def test_a_model_of_which_a_submodule_has_another_forward_is_captured(programs: Any) -> None:
    programs(Net(2.0))
    model = Net(2.0)
    before = model.norm.forward
    model.norm.forward = lambda x: before(x) * 0.5
    assert programs(model)[1] == 2
