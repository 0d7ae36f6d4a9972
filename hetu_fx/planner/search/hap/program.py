"""A synthesised program: how each op is done, what is exchanged before it, and what that costs at any ratios.

With ratios r_si, speeds v_i and stages t of ops between exchanges of activations

    seconds = sum_t max_i (sum_s F_ts r_si + G_t) / v_i + sum of the exchanges                    (1)

F being FLOPs that are cut, G those that every device does, forward and backward (HAP, EuroSys 2024, section 5.1).
Exchanges of parameters and of their gradients split no stage: they can go at the step's ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import truediv
from typing import NamedTuple

from hetu_fx.planner.search.hap.forms import OpForm
from hetu_fx.planner.search.hap.prices import PricedCollective, Ratios
from hetu_fx.planner.search.hap.rounding import rounded
from hetu_fx.planner.search.hap.states import Layout
from hetu_fx.planner.values.tensor_program import Op


class LayoutChange(NamedTuple):
    """A tensor is made to lie otherwise, for the op that follows and those after it."""

    tensor: str
    source: Layout
    target: Layout
    transfers: tuple[PricedCollective, ...]
    is_parameter: bool

    @property
    def ends_stage(self) -> bool:
        """Tell whether devices wait for each other here."""
        return bool(self.transfers) and not self.is_parameter


class HapStep(NamedTuple):
    """An op in one of its forms.

    Attributes:
        op, form: what is done, and how.
        homes: layout in which parameters that nothing before it reads are held.
        changes: what happens to its operands before.
        gathered: what sufficient-factor broadcasting gathers in the backward.
    """

    op: Op
    form: OpForm
    homes: tuple[tuple[str, Layout], ...] = ()
    changes: tuple[LayoutChange, ...] = ()
    gathered: tuple[PricedCollective, ...] = ()

    @property
    def ends_stage(self) -> bool:
        """Tell whether devices wait for each other before the op."""
        return any(change.ends_stage for change in self.changes)

    @property
    def transfers(self) -> tuple[PricedCollective, ...]:
        """Return all its exchanges."""
        return (*(transfer for change in self.changes for transfer in change.transfers), *self.gathered)


class HapStage(NamedTuple):
    """Work between exchanges: FLOPs cut by each segment's ratios, and FLOPs of every device."""

    cut_flops: tuple[float, ...]
    whole_flops: float

    def seconds(self, speeds: Sequence[float], ratios: Ratios) -> tuple[float, ...]:
        """Return the seconds of each device."""
        return tuple(
            (sum(f * shares[i] for f, shares in zip(self.cut_flops, ratios, strict=True)) + self.whole_flops) / speed
            for i, speed in enumerate(speeds)
        )


@dataclass(frozen=True)
class HapProgram:
    """Steps in order; `waits_after_each_op` makes each a stage of its own, as HAP's released code counts."""

    steps: tuple[HapStep, ...]
    num_segments: int = 1
    waits_after_each_op: bool = False

    @cached_property
    def stages(self) -> tuple[HapStage, ...]:
        """Return the stages, in order."""
        return tuple(self._stage(steps) for steps in self._runs())

    @cached_property
    def transfers(self) -> tuple[PricedCollective, ...]:
        """Return all exchanges, in the order of the ops that they stand before."""
        return tuple(transfer for step in self.steps for transfer in step.transfers)

    def seconds(self, speeds: Sequence[float], ratios: Ratios) -> float:
        """Return (1)."""
        work = math.fsum(max(stage.seconds(speeds, ratios)) for stage in self.stages)
        return work + math.fsum(transfer.seconds(ratios) for transfer in self.transfers)

    def rounded_seconds(self, speeds: Sequence[float], ratios: Ratios) -> float:
        """Return (1) with the work of whole indices: 3 heads on 2 devices are 2 and 1, whatever the ratios."""
        work = math.fsum(max(self._rounded(steps, speeds, ratios)) for steps in self._runs())
        return work + math.fsum(transfer.seconds(ratios) for transfer in self.transfers)

    def _rounded(self, steps: Sequence[HapStep], speeds: Sequence[float], ratios: Ratios) -> tuple[float, ...]:
        flops = [math.fsum(step.form.whole_flops for step in steps)] * len(speeds)
        for form in (step.form for step in steps if step.form.cut is not None):
            shares = rounded(ratios[form.segment], form.units)
            flops = [sum_ + form.cut_flops * share / form.units for sum_, share in zip(flops, shares, strict=True)]
        return tuple(map(truediv, flops, speeds))

    def compute_seconds(self, speeds: Sequence[float], ratios: Ratios) -> tuple[float, ...]:
        """Return each device's seconds of work."""
        columns = (stage.seconds(speeds, ratios) for stage in self.stages)
        return tuple(math.fsum(column) for column in zip(*columns, strict=True)) or (0.0,) * len(speeds)

    def _runs(self) -> Iterator[list[HapStep]]:
        run: list[HapStep] = []
        for step in self.steps:
            if run and (self.waits_after_each_op or step.ends_stage):
                yield run
                run = []
            run.append(step)
        if run:
            yield run

    def _stage(self, steps: Sequence[HapStep]) -> HapStage:
        cut = [0.0] * self.num_segments
        for step in steps:
            cut[step.form.segment] += step.form.cut_flops
        return HapStage(tuple(cut), math.fsum(step.form.whole_flops for step in steps))
