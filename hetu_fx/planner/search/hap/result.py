"""What the HAP search returns: the program, its ratios, and what they are expected to cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hetu_fx.planner.search.hap.assemble import Bytes
from hetu_fx.planner.search.hap.prices import PricedCollective, Ratios
from hetu_fx.planner.search.hap.program import HapProgram
from hetu_fx.planner.search.hap.states import Layout
from hetu_fx.plans.prediction import DeviceCost, Prediction


@dataclass(frozen=True)
class HapResult:
    """The best pair of program and ratios that was found.

    Attributes:
        program: how each op is done.
        ratios: per segment, each device's share, in the order of `ranks`.
        seconds: of a step.
        ranks, speeds: the devices, and their FLOPs per second.
        held: bytes that tensors take.
        rounds: seconds of each pair that was tried, as (program found at, after the ratio programme).
        num_states: states that were taken, over all searches.
        is_exact: whether each search proved its program the fastest at its ratios.
    """

    program: HapProgram
    ratios: Ratios
    seconds: float
    ranks: tuple[int, ...]
    speeds: tuple[float, ...]
    held: Bytes
    rounds: tuple[tuple[float, float], ...]
    num_states: int
    is_exact: bool

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Return the layout in which each parameter is held and each value is made."""
        pairs = [
            pair
            for step in self.program.steps
            for pair in (*step.homes, *zip(step.op.makes, step.form.makes, strict=True))
        ]
        return dict(pairs)

    @property
    def transfers(self) -> tuple[PricedCollective, ...]:
        """Return the exchanges, in the order of the ops that they stand before."""
        return self.program.transfers

    @property
    def rounded_seconds(self) -> float:
        """Return the seconds of a step when parts are whole indices of what is cut."""
        return self.program.rounded_seconds(self.speeds, self.ratios)

    @property
    def exchange_seconds(self) -> float:
        """Return the seconds of all exchanges."""
        return math.fsum(transfer.seconds(self.ratios) for transfer in self.transfers)

    @property
    def why(self) -> str:
        """Return what bounds the step, in a sentence."""
        compute = self.seconds - self.exchange_seconds
        ideal = math.fsum(sum(s.cut_flops) + s.whole_flops for s in self.program.stages) / sum(self.speeds)
        longest = max(self.transfers, key=lambda t: t.seconds(self.ratios), default=None)
        exchange = f"; longest exchange: {longest}" if longest else ""
        count = f"{len(self.transfers)} exchanges in {len(self.program.stages)} stages"
        return (
            f"{compute:.4g} s of work ({ideal:.4g} s if all of it were shared by speed) and "
            f"{self.exchange_seconds:.4g} s of {count}{exchange}"
        )

    @property
    def prediction(self) -> Prediction:
        """Return seconds and bytes of each device, by term."""
        work = self.program.compute_seconds(self.speeds, self.ratios)
        devices = tuple(
            DeviceCost(
                rank,
                (("compute", work[i]), ("exchange", self.exchange_seconds), ("idle", self._idle(work[i]))),
                (("held", math.ceil(self.held.on_device(i, self.ratios))),),
            )
            for i, rank in enumerate(self.ranks)
        )
        return Prediction(self.seconds, devices, why=self.why)

    def _idle(self, work: float) -> float:
        return max(0.0, self.seconds - self.exchange_seconds - work)
