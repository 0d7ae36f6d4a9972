"""Optimizers' steps are timed as they are called, each once."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hetu_fx.switching.adapt.health import UpdateTimes


class Ticks:
    """A clock that goes on by one at every look."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now(self) -> int:
        return next(self._ticks)

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, without hooks, as accelerate makes them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_the_steps_of_an_optimizer_inside_another_count() -> None:
    times, inner = UpdateTimes(Ticks()), optimizer()
    times.time_steps_of([Wrapped(inner)])
    inner.step()
    assert times.taken() == 1.0


def test_the_steps_of_all_optimizers_since_the_last_look_count() -> None:
    times, optimizers = UpdateTimes(Ticks()), [optimizer(), optimizer()]
    optimizers[0].step()
    for _ in range(2):
        times.time_steps_of(optimizers)
    assert times.taken() == 0.0
    for one in (*optimizers, optimizers[0]):
        one.step()
    assert times.taken() == 3.0
    assert times.taken() == 0.0


def test_a_step_that_is_timed_from_its_middle_on_does_not_count() -> None:
    times, inner = UpdateTimes(Ticks()), optimizer()

    def closure() -> float:
        times.time_steps_of([inner])
        return 0.0

    inner.step(closure)
    assert times.taken() == 0.0
    inner.step()
    assert times.taken() == 1.0
