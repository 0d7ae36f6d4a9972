"""Optimizers' steps are timed as they are called, each once."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hetu_fx.switching.update_times import UpdateTimes


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


def test_the_steps_of_all_optimizers_since_the_last_look_count_without_what_they_wait_for() -> None:
    clock, optimizers = Ticks(), [optimizer(), optimizer()]
    times = UpdateTimes(clock, settle=clock.now)
    optimizers[0].step()
    for _ in range(2):
        times.listen_to(optimizers)
    assert times.taken() == 0.0
    for one in (*optimizers, optimizers[0]):
        one.step()
    assert times.taken() == 3.0
    assert times.taken() == 0.0
