"""What is executed: plans that train a small model of as many blocks as that which they were made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.planted.worlds import Net, batches_of
from hetu_fx.check.verdict import TrialVerdict, judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan

TOLERANCE = 1e-10
ROWS = 64
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Trace:
    """A published plan, or one of a published search, and the small model that it trains.

    Of several `plans` each runs a step; one runs them all. `lost` are the devices that are gone when each step begins;
    None: none ever is. `predicted` and `published` are the seconds of a step of the model that it was made for, as far
    as they are known.
    """

    paper: str
    name: str
    plans: tuple[Plan, ...]
    blocks: int
    width: int
    heads: int
    predicted: float | None = None
    published: float | None = None
    lost: tuple[frozenset[int], ...] | None = None

    def model(self) -> nn.Module:
        """Make the model, always with the same numbers."""
        torch.manual_seed(5)
        return Net(self.blocks, self.width, self.heads).double()

    def batches(self) -> list[Mapping[str, Any]]:
        """Make the batches, one for each step."""
        return list(batches_of(ROWS, max(2, len(self.plans))))

    def rows(self) -> list[Mapping[str, Any]]:
        """Make the same batches as one device takes them."""
        return self.batches()

    def execute(self) -> Executed:
        """Train by all ranks, and compare that with one device."""
        model, batches, rows = self.model(), self.batches(), self.rows()
        order = range(len(self.plans)) if len(self.plans) > 1 else None
        how = Lockstep(SGD, plan_of_step=order, lost_by_step=self.lost)
        captured = how.capture(model, rows[0])
        made = how.train(model, batches, self.plans, captured)
        verdict = judge(self.name, train_alone(model, rows, how), made, TOLERANCE, "")
        return Executed(verdict, [change.total_bytes for change in made.moved.values()])


class Executed(NamedTuple):
    """How a training compares with one device, and the bytes that changes of homes have moved."""

    verdict: TrialVerdict
    moved_bytes: list[int]


class Named(NamedTuple):
    """What makes a trace; some are searched for, which takes a while."""

    paper: str
    name: str
    make: Callable[[], Trace]
