"""Plan as HAP does: synthesise a program at fixed ratios, find ratios for the fixed program, and so on.

After HAP (EuroSys 2024, arXiv 2401.05965) and its released code. Ratios start in proportion to the devices'
speeds, and once more even. A program is synthesised at the ratios (`synthesis`), the ratio programme is solved
for it (`program`), and that goes on while it lowers the seconds. The best pair of program and ratios that was
met is returned (the released code keeps the best program and the latest ratios).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.assemble import Synthesised, bytes_of, synthesise
from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.forms import SynthesisRules
from hetu_fx.planner.search.hap.prices import Collectives, PricedCollective, RatioPrices, Ratios
from hetu_fx.planner.search.hap.program import HapProgram, best_ratios
from hetu_fx.planner.search.hap.states import Bytes, Layout, Limits
from hetu_fx.planner.values.tensor_program import TensorProgram
from hetu_fx.plans.prediction import DeviceCost, Prediction

MOST_ROUNDS = 8
"""So often at most program and ratios are found anew from one start."""

NEGLIGIBLE = 1e-6
"""A pair that is faster by a smaller part than this is no better."""


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


def search(
    problem: TensorProgram,
    cluster: Cluster,
    *,
    collectives: Collectives | None = None,
    rules: SynthesisRules | None = None,
    ratios: Sequence[Ratios] = (),
    memory_fraction: float = 0.9,
    zero: int = 1,
    blocks_once: bool = True,
) -> HapResult:
    """Return the best program and ratios for all devices of a cluster.

    Args:
        problem: the program; see `from_graph` for a captured model.
        cluster: the devices; each takes part.
        collectives: measured ones; None: as the cluster's links have it.
        rules: what the search may do; None: all that is sound.
        ratios: to start from; left out: in proportion to speeds, and even.
        memory_fraction: how much of a device's memory may be filled.
        zero: 1 if copies of a parameter share its optimizer states, 0 if not.
        blocks_once: whether equal blocks are searched once, which changes no result.

    A problem of several segments is also planned as if it were one. Raises `PlanError` when no program fits.
    """
    prices = collectives or Collectives.of_cluster(cluster)
    found = []
    for given in [problem, problem.in_one_segment()][: 1 if problem.num_segments == 1 else 2]:
        search = _Alternation(given, cluster, prices, rules or SynthesisRules(), memory_fraction, zero)
        starts = [start[: given.num_segments] for start in ratios] or list(search.starts())
        for start in starts:
            search.alternate(start, blocks_once)
        found.append(search.result())
    return min(found, key=lambda result: result.seconds)


@dataclass
class _Pair:
    program: HapProgram
    ratios: Ratios
    seconds: float


@dataclass
class _Alternation:
    """The best pair so far, and how it came about."""

    problem: TensorProgram
    cluster: Cluster
    collectives: Collectives
    rules: SynthesisRules
    memory_fraction: float
    zero: int
    best: _Pair | None = None
    rounds: list[tuple[float, float]] = field(default_factory=list)
    found: list[Synthesised] = field(default_factory=list)
    tried: list[Ratios] = field(default_factory=list)

    @property
    def speeds(self) -> tuple[float, ...]:
        return tuple(device.speed for device in self.cluster.devices)

    @property
    def room(self) -> tuple[float, ...]:
        return tuple(device.memory_bytes * self.memory_fraction for device in self.cluster.devices)

    def starts(self) -> Iterator[Ratios]:
        """Yield ratios in proportion to speeds and even ones, if that is not the same."""
        total, count = sum(self.speeds), len(self.speeds)
        shares = tuple(speed / total for speed in self.speeds)
        yield (shares,) * self.problem.num_segments
        if len(set(shares)) > 1 and not self.rules.waits_after_each_op:
            yield ((1 / count,) * count,) * self.problem.num_segments

    def alternate(self, ratios: Ratios, blocks_once: bool) -> None:
        """Find program and ratios in turn, as long as that lowers the seconds."""
        limits = Limits.of(self.room, self.problem)
        least = float("inf")
        for _ in range(MOST_ROUNDS):
            if any(_are_near(ratios, other) for other in self.tried):
                return
            self.tried.append(ratios)
            prices = RatioPrices(self.speeds, self.collectives, ratios)
            expansion = Expansion(self.problem, prices, self.rules, limits, self.zero)
            found = synthesise(expansion, blocks_once=blocks_once)
            self.found.append(found)
            before = self._seconds(found.program, ratios, limits)
            ratios = self._ratios(found.program, limits)
            after = self._seconds(found.program, ratios, limits)
            self.rounds.append((before, after))
            if min(before, after) >= least * (1 - NEGLIGIBLE):
                return
            least = min(before, after)

    def _ratios(self, program: HapProgram, limits: Limits) -> Ratios:
        held = bytes_of(program, self.problem, zero=self.zero)
        room = self.room if limits.bind else ()
        return best_ratios(
            program, self.speeds, held=held, memory_bytes=room, drops_constants=self.rules.drops_constants
        )

    def _seconds(self, program: HapProgram, ratios: Ratios, limits: Limits) -> float:
        """Return the seconds of a pair, infinite if it does not fit; remember the best."""
        held = bytes_of(program, self.problem, zero=self.zero)
        sizes = (held.on_device(index, ratios) for index in range(len(self.speeds)))
        if limits.bind and any(size > room * (1 + NEGLIGIBLE) for size, room in zip(sizes, self.room, strict=True)):
            return float("inf")
        seconds = program.seconds(self.speeds, ratios)
        if self.best is None or seconds < self.best.seconds * (1 - NEGLIGIBLE):
            self.best = _Pair(program, ratios, seconds)
        return seconds

    def result(self) -> HapResult:
        """Return the best pair."""
        if self.best is None:
            raise PlanError(f"no program of {len(self.problem.ops)} ops fits devices {list(self.cluster.ranks)}")
        best = self.best
        return HapResult(
            program=best.program,
            ratios=best.ratios,
            seconds=best.seconds,
            ranks=self.cluster.ranks,
            speeds=self.speeds,
            held=bytes_of(best.program, self.problem, zero=self.zero),
            rounds=tuple(self.rounds),
            num_states=sum(found.num_states for found in self.found),
            is_exact=all(found.is_exact for found in self.found),
        )


def _are_near(one: Ratios, other: Ratios) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(abs(a - b) < NEGLIGIBLE for a, b in pairs)
