"""A synthesised program: how each op is done, what is exchanged before it, what that costs, and its best ratios.

With ratios r_si, speeds v_i and stages t of ops between exchanges of activations

    seconds = sum_t max_i (sum_s F_ts r_si + G_t) / v_i + sum of the exchanges                    (1)

F being FLOPs that are cut, G those that every device does, forward and backward (HAP, EuroSys 2024, section 5.1).
Exchanges of parameters and of their gradients split no stage: they can go at the step's ends.

The ratios under which it is fastest are those of a linear programme, mixed with one bit for each pair of segments.
Over ratios r_si, seconds C_t of stages, the largest ratio M_s of a segment, the distance D_su of two segments'
boundaries, and whether there is one (Z_su of 0 or 1, at least D_su), minimise

    sum_t C_t + sum_s p_s M_s + sum_su (q_su D_su + a_su Z_su)                                    (2)
    sum_s F_ts r_si + G_t  <=  v_i C_t             for each stage t and device i                  (3)
    r_si <= M_s,   |sum_j<=i (r_sj - r_uj)| <= D_su,   sum_i r_si = 1,   r >= 0                   (4)
    C + sum_s S_s r_si  <=  memory of i                                                           (5)

(HAP, equation 3. The released code leaves out the constants G of (3), which matter when unequal devices do the same
work, knows no (5) and no a_su, which segments of equal ratios do without, and gives each C_t a variable per op.) Stages
of equal work are one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.forms import OpForm
from hetu_fx.planner.search.hap.prices import PricedCollective, Ratios
from hetu_fx.planner.search.hap.states import Bytes, ChangeKind, Layout
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
    """Steps in order; `waits_after_each_op` makes each a stage of its own, as HAP's released code counts.

    `stages` stand between exchanges of activations, `transfers` are all exchanges, each before its op.
    """

    steps: tuple[HapStep, ...]
    num_segments: int = 1
    waits_after_each_op: bool = False
    stages: tuple[HapStage, ...] = field(init=False, repr=False, compare=False)
    transfers: tuple[PricedCollective, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(map(self._stage, self._runs())))
        transfers = tuple(transfer for step in self.steps for transfer in step.transfers)
        object.__setattr__(self, "transfers", transfers)

    def seconds(self, speeds: Sequence[float], ratios: Ratios) -> float:
        """Return (1)."""
        work = math.fsum(max(stage.seconds(speeds, ratios)) for stage in self.stages)
        return work + math.fsum(transfer.seconds(ratios) for transfer in self.transfers)

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


_Row = dict[int, float]


@dataclass
class _Inequalities:
    """Rows of A x <= b."""

    rows: list[_Row] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def add(self, row: _Row, bound: float) -> None:
        self.rows.append(row)
        self.bounds.append(bound)

    def matrix(self, width: int) -> coo_array:
        entries = [(i, j, value) for i, row in enumerate(self.rows) for j, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.rows), width))


@dataclass(frozen=True)
class _Columns:
    """Which variable is which: ratios, stages, largest ratios, and of each pair its distance and whether it has one."""

    num_devices: int
    num_segments: int
    num_stages: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(combinations(range(self.num_segments), 2))

    @property
    def width(self) -> int:
        return self.apart(len(self.pairs))

    def ratio(self, segment: int, device: int) -> int:
        return segment * self.num_devices + device

    def stage(self, index: int) -> int:
        return self.num_segments * self.num_devices + index

    def largest(self, segment: int) -> int:
        return self.stage(self.num_stages) + segment

    def distance(self, index: int) -> int:
        return self.largest(self.num_segments) + index

    def apart(self, index: int) -> int:
        return self.distance(len(self.pairs)) + index


def best_ratios(
    program: HapProgram,
    speeds: Sequence[float],
    *,
    held: Bytes | None = None,
    memory_bytes: Sequence[float] = (),
    drops_constants: bool = False,
) -> Ratios:
    """Return the ratios that minimise a program's seconds; with `memory_bytes`, those under which it fits.

    Raises `PlanError` when it fits under none.
    """
    stages = Counter(program.stages)
    columns = _Columns(len(speeds), program.num_segments, len(stages))
    scale = _scale(program, speeds)
    rows = _Inequalities()
    _add_stages(rows, columns, list(stages), speeds, scale, drops_constants)
    _add_largest_and_distances(rows, columns)
    if held is not None and memory_bytes:
        _add_memory(rows, columns, held, memory_bytes)
    cost = _objective(program, columns, list(stages.values()), scale)
    whole, is_bit = np.zeros((program.num_segments, columns.width)), np.zeros(columns.width)
    is_bit[columns.apart(0) :] = 1
    for segment in range(program.num_segments):
        whole[segment, columns.ratio(segment, 0) : columns.ratio(segment + 1, 0)] = 1.0
    given = (rows.matrix(columns.width), rows.bounds, whole, np.ones(len(whole)))
    found = linprog(cost, *given, method="highs", integrality=is_bit)
    if found.status != 0:
        raise PlanError(
            f"no ratios of {len(speeds)} devices fit the program in memory {list(memory_bytes)}: {found.message}"
        )
    return _shares(found.x, columns)


def _scale(program: HapProgram, speeds: Sequence[float]) -> float:
    """Return seconds of the order of the program's: the solver's tolerances are for numbers near 1."""
    even = ((1 / len(speeds),) * len(speeds),) * program.num_segments
    return program.seconds(speeds, even) or 1.0


def _add_stages(
    rows: _Inequalities,
    columns: _Columns,
    stages: Sequence[HapStage],
    speeds: Sequence[float],
    scale: float,
    drops: bool,
) -> None:
    for index, stage in enumerate(stages):
        for device, speed in enumerate(speeds):
            row = {columns.ratio(s, device): f / speed / scale for s, f in enumerate(stage.cut_flops) if f}
            constant = 0.0 if drops else stage.whole_flops / speed / scale
            rows.add(row | {columns.stage(index): -1.0}, -constant)


def _add_largest_and_distances(rows: _Inequalities, columns: _Columns) -> None:
    devices = range(columns.num_devices)
    for segment in range(columns.num_segments):
        for device in devices:
            rows.add({columns.ratio(segment, device): 1.0, columns.largest(segment): -1.0}, 0.0)
    for index, (one, other) in enumerate(columns.pairs):
        rows.add({columns.distance(index): 1.0, columns.apart(index): -1.0}, 0.0)
        for stop in devices:
            for sign in (1.0, -1.0):
                row = {columns.ratio(one, device): sign for device in range(stop + 1)}
                row |= {columns.ratio(other, device): -sign for device in range(stop + 1)}
                rows.add(row | {columns.distance(index): -1.0}, 0.0)


def _add_memory(rows: _Inequalities, columns: _Columns, held: Bytes, memory_bytes: Sequence[float]) -> None:
    for device, limit in enumerate(memory_bytes):
        row = {columns.ratio(s, device): spread / limit for s, spread in enumerate(held.spread) if spread}
        rows.add(row or {columns.ratio(0, device): 0.0}, 1 - held.copied / limit)


def _objective(program: HapProgram, columns: _Columns, counts: Sequence[int], scale: float) -> np.ndarray:
    cost = np.zeros(columns.width)
    cost[columns.stage(0) : columns.stage(len(counts))] = counts
    for transfer in program.transfers:
        match transfer.follows:
            case (segment,):
                cost[columns.largest(segment)] += transfer.seconds_per_share / scale
            case (one, other):
                pair = columns.pairs.index((min(one, other), max(one, other)))
                cost[columns.distance(pair)] += transfer.seconds_per_share / scale
                if transfer.change is ChangeKind.SHIFT:
                    cost[columns.apart(pair)] += transfer.fixed_seconds / scale
    return cost


def _shares(solution: np.ndarray, columns: _Columns) -> Ratios:
    """Return the ratios; those of segments that are not apart are the same to the last digit."""
    table = solution[: columns.stage(0)].reshape(columns.num_segments, columns.num_devices).clip(0.0)
    rows = [tuple(float(share) for share in row / row.sum()) for row in table]
    for index, (one, other) in enumerate(columns.pairs):
        if solution[columns.apart(index)] < 0.5:
            rows[other] = rows[one]
    return tuple(rows)
