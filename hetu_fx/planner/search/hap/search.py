"""Plan as HAP does: synthesise a program at fixed ratios, find ratios for the fixed program, and so on.

After HAP (EuroSys 2024, arXiv 2401.05965) and its released code. Ratios start in proportion to the devices'
speeds, and once more even. A program is synthesised at the ratios (`synthesis`), the ratio programme is solved
for it (`program`), and that goes on while it lowers the seconds. The best pair of program and ratios that was
met is returned (the released code keeps the best program and the latest ratios).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.expand import Expansion
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.op_program import HapProgram, HapStep, best_ratios
from hetu_fx.planner.search.hap.prices import Collectives, RatioPrices, Ratios
from hetu_fx.planner.search.hap.synthesised_program import HapResult, SynthesizedProgram, synthesise
from hetu_fx.planner.search.hap.tensor_states import (
    Bytes,
    HeldBytes,
    Layout,
    LayoutKind,
    Limits,
    held_bytes,
    held_bytes_after,
)
from hetu_fx.planner.values.tensor_program import TensorProgram

MOST_ROUNDS = 8
"""So often at most program and ratios are found anew from one start."""

NEGLIGIBLE = 1e-6
"""A pair that is faster by a smaller part than this is no better."""


def search(
    problem: TensorProgram,
    cluster: Cluster,
    *,
    collectives: Collectives | None = None,
    rules: SynthesisRules | None = None,
    memory_fraction: float = 0.9,
    zero: int = 1,
    rounds: int = MOST_ROUNDS,
) -> HapResult:
    """Return the best program and ratios for all devices of a cluster.

    It starts from ratios in proportion to the speeds, and from even ones.

    Args:
        problem: the program; see `count.graph_problem_of` for a captured model.
        cluster: the devices; each takes part.
        collectives: measured ones; None: as the cluster's links have it.
        rules: what the search may do; None: all that is sound.
        memory_fraction: how much of a device's memory may be filled.
        zero: 1 if copies of a parameter share its optimizer states, 0 if not.
        rounds: so often at most program and ratios are found anew from one start; with 1 from the first start alone,
            at whose ratios, in proportion to speeds, one device stands for all.

    A problem of several segments is also planned as if it were one. Raises `PlanError` when no program fits.
    """
    prices = collectives or Collectives.of_cluster(cluster)
    problem = problem.at(fmean(device.flops_per_byte for device in cluster.devices))
    found = []
    for given in [problem, problem.in_one_segment()][: 1 if problem.num_segments == 1 else 2]:
        search = _Alternation(given, cluster, prices, rules or SynthesisRules(), memory_fraction, zero)
        for start in itertools.islice(search.starts(), 1 if rounds == 1 else None):
            search.alternate(start, rounds)
        found.append(search.result())
    return min(found, key=lambda result: result.seconds)


@dataclass
class _Alternation:
    """The best pair so far, and how it came about."""

    problem: TensorProgram
    cluster: Cluster
    collectives: Collectives
    rules: SynthesisRules
    memory_fraction: float
    zero: int
    best: tuple[HapProgram, Ratios, float] | None = None
    rounds: list[tuple[float, float]] = field(default_factory=list)
    found: list[SynthesizedProgram] = field(default_factory=list)
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

    def alternate(self, ratios: Ratios, rounds: int) -> None:
        """Find program and ratios in turn, as long as that lowers the seconds."""
        limits = Limits.of(self.room, self.problem)
        least = float("inf")
        for _ in range(rounds):
            if any(_are_near(ratios, other) for other in self.tried):
                return
            self.tried.append(ratios)
            prices = RatioPrices(self.speeds, self.collectives, ratios)
            expansion = Expansion(self.problem, prices, self.rules, limits, self.zero)
            found = synthesise(expansion)
            self.found.append(found)
            before = self._seconds(found.program, ratios, limits)
            ratios = self._ratios(found.program, limits)
            after = self._seconds(found.program, ratios, limits)
            self.rounds.append((before, after))
            if min(before, after) >= least * (1 - NEGLIGIBLE):
                return
            least = min(before, after)

    def _ratios(self, program: HapProgram, limits: Limits) -> Ratios:
        held = program_bytes(program, self.problem, zero=self.zero)
        room = self.room if limits.bind else ()
        return best_ratios(
            program, self.speeds, held=held, memory_bytes=room, drops_constants=self.rules.drops_constants
        )

    def _seconds(self, program: HapProgram, ratios: Ratios, limits: Limits) -> float:
        """Return the seconds of a pair, infinite if it does not fit; remember the best."""
        held = program_bytes(program, self.problem, zero=self.zero)
        sizes = (held.on_device(index, ratios) for index in range(len(self.speeds)))
        if limits.bind and any(size > room * (1 + NEGLIGIBLE) for size, room in zip(sizes, self.room, strict=True)):
            return float("inf")
        seconds = program.seconds(self.speeds, ratios)
        if self.best is None or seconds < self.best[-1] * (1 - NEGLIGIBLE):
            self.best = program, ratios, seconds
        return seconds

    def result(self) -> HapResult:
        """Return the best pair."""
        if self.best is None:
            raise PlanError(f"no program of {len(self.problem.ops)} ops fits devices {list(self.cluster.ranks)}")
        return HapResult(
            *self.best,
            ranks=self.cluster.ranks,
            speeds=self.speeds,
            held=program_bytes(self.best[0], self.problem, zero=self.zero),
            rounds=tuple(self.rounds),
            num_states=sum(found.num_states for found in self.found),
            is_exact=all(found.is_exact for found in self.found),
        )


def _are_near(one: Ratios, other: Ratios) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(abs(a - b) < NEGLIGIBLE for a, b in pairs)


def program_bytes(program: HapProgram, problem: TensorProgram, *, zero: int = 1) -> Bytes:
    """Return what the tensors of a program take."""
    entries = [entry for step in program.steps for entry in _held(step, problem, zero)]
    spread = [0.0] * program.num_segments
    for segment, one in entries:
        spread[segment] += one.spread
    return Bytes(math.fsum(one.copied for _, one in entries), tuple(spread))


def _held(step: HapStep, problem: TensorProgram, zero: int) -> Iterator[tuple[int, HeldBytes]]:
    pairs: list[tuple[str, Layout]] = [*step.homes, *zip(step.op.makes, step.form.makes, strict=True)]
    for name, layout in pairs:
        yield _segment(layout, step), held_bytes(problem.by_name[name], layout, zero=zero)
    for change in step.changes:
        if any(not transfer.is_backward for transfer in change.transfers):
            yield _segment(change.target, step), held_bytes_after(problem.by_name[change.tensor], change.target)


def _segment(layout: Layout, step: HapStep) -> int:
    return layout.segment if layout.kind is LayoutKind.SPLIT else step.op.segment
