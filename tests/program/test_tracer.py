"""A forward that goes on by the time is refused; one that logs it is not."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import CaptureError
from tests.program.guarded import Watching

START, TODAY = monotonic(), datetime.datetime


class Timed(nn.Module):
    """Has a layer, and does something with what it makes."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act, self.took = nn.Linear(3, 2), act, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def by_the_second(module: Any, y: Tensor) -> Tensor:
    return y * (1 + 0.1 * math.sin(time.time()))


def by_the_hour(module: Any, y: Tensor) -> Tensor:
    return y * datetime.datetime.now().hour


def by_the_day(module: Any, y: Tensor) -> Tensor:
    return y * TODAY.today().day


def by_what_is_imported(module: Any, y: Tensor) -> Tensor:
    return y * (int(monotonic() - START) // 3600)


def by_whole_numbers(module: Any, y: Tensor) -> Tensor:
    return y * (time.monotonic_ns() // 10**10)


def by_a_constant(module: Any, y: Tensor) -> Tensor:
    return y * torch.tensor([time.perf_counter(), 1.0])


def by_a_deadline(module: Any, y: Tensor) -> Tensor:
    if time.monotonic() - START > 12000:
        raise TimeoutError
    return y


def logs(module: Any, y: Tensor) -> Tensor:
    start = time.perf_counter()
    y = y * 2
    module.took = time.perf_counter() - start
    print(f"{monotonic() - START} s, at {datetime.datetime.now()}")
    return y


MOVES = (by_the_second, by_the_hour, by_the_day, by_what_is_imported, by_whole_numbers, by_a_constant, by_a_deadline)


@pytest.mark.parametrize("act", MOVES)
def test_a_forward_that_goes_on_by_the_time_is_refused(act: Any) -> None:
    with pytest.raises(CaptureError, match=r"goes on by the time \((time|datetime|TODAY|monotonic|perf_counter)"):
        Watching(Timed(act)).program()


def test_a_forward_that_logs_what_it_took_is_captured() -> None:
    watching = Watching(Timed(logs))
    assert watching.program() is watching.program()
