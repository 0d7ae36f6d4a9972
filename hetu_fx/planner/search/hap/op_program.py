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
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts are imported when they are first used

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.op_forms import OpForm
from hetu_fx.planner.search.hap.prices import PricedCollective, Ratios
from hetu_fx.planner.search.hap.tensor_states import Bytes, ChangeKind, Layout
from hetu_fx.planner.values.tensor_program import Op

Rows = Any  # of inequalities: scipy.sparse.coo_array


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
    count, segments, stages = len(speeds), program.num_segments, Counter(program.stages)
    pairs = list(combinations(range(segments), 2))
    sizes = segments * count, len(stages), segments, len(pairs), len(pairs)  # of r, C, M, D and Z
    ends = list(accumulate(sizes))
    scale = program.seconds(speeds, ((1 / count,) * count,) * segments) or 1.0  # tolerances are for numbers near 1
    work = _by_device([stage.cut_flops for stage in stages], speeds, scale)
    whole = np.array([[0.0 if drops_constants else stage.whole_flops] for stage in stages]) / np.array(speeds) / scale
    needs = [] if held is None or not memory_bytes else [_by_device([held.spread], memory_bytes)]
    rows = _inequalities(work, needs, segments, pairs)
    bounds = np.zeros(rows.shape[0])
    bounds[: whole.size] = -whole.ravel()
    if held is not None and needs:
        bounds[whole.size + ends[0] :][:count] = 1 - held.copied / np.array(memory_bytes)
    shares = np.zeros((segments, ends[-1]))
    shares[:, : ends[0]] = np.kron(np.eye(segments), np.ones(count))
    given = rows, bounds, shares, np.ones(segments)
    cost = _objective(program, list(stages.values()), pairs, ends, scale)
    found = scipy.optimize.linprog(cost, *given, method="highs", integrality=np.arange(ends[-1]) >= ends[3])
    if found.status != 0:
        raise PlanError(f"no ratios of {count} devices fit the program in memory {list(memory_bytes)}: {found.message}")
    return _shares(found.x[: ends[0]].reshape(segments, count), pairs, found.x[ends[3] :])


def _shares(table: np.ndarray, pairs: Sequence[tuple[int, int]], bits: np.ndarray) -> Ratios:
    """Return the ratios; those of segments that are not apart are the same to the last digit."""
    rows = [tuple(float(share) for share in row / row.sum()) for row in table.clip(0.0)]
    for (one, other), is_apart in zip(pairs, bits, strict=True):
        if is_apart < 0.5:
            rows[other] = rows[one]
    return tuple(rows)


def _by_device(table: Sequence[Sequence[float]], divisors: Sequence[float], scale: float = 1.0) -> Rows:
    """Return the table over ratios, a row for each of its rows and devices, divided by the device's number."""
    sparse = scipy.sparse
    found = sparse.kron(sparse.coo_array(np.array(table)), sparse.eye_array(len(divisors)), format="coo")
    found.data = found.data / np.array(divisors)[found.row % len(divisors)] / scale
    return found


def _inequalities(
    work: Rows,
    needs: Sequence[Rows],
    segments: int,
    pairs: Sequence[tuple[int, int]],
) -> Rows:
    """Return (3), (4) for each segment, (5), and (4) for each pair, with all unknowns on the left."""
    sparse, count = scipy.sparse, work.shape[1] // segments
    stages, each = work.shape[0] // count, np.ones((count, 1))
    blocks = [
        [work, -sparse.kron(sparse.eye_array(stages), each), None],
        [sparse.eye_array(segments * count), None, -sparse.kron(sparse.eye_array(segments), each)],
        *([held, None, None] for held in needs),
    ]
    if pairs:
        apart = np.zeros((len(pairs), segments))
        for number, (one, other) in enumerate(pairs):
            apart[number, one], apart[number, other] = 1.0, -1.0
        boundaries, bits = sparse.kron(sparse.coo_array(apart), np.tri(count)), sparse.eye_array(len(pairs))
        distances = -sparse.kron(bits, each)
        blocks = [[*row, None, None] for row in blocks]
        blocks += [[sign * boundaries, None, None, distances, None] for sign in (1, -1)]
        blocks.append([None, None, None, bits, -bits])
    return sparse.block_array(blocks)


def _objective(
    program: HapProgram, counts: Sequence[int], pairs: Sequence[tuple[int, int]], ends: Sequence[int], scale: float
) -> np.ndarray:
    cost = np.zeros(ends[-1])
    cost[ends[0] : ends[1]] = counts
    for transfer in program.transfers:
        match transfer.follows:
            case (segment,):
                cost[ends[1] + segment] += transfer.seconds_per_share / scale
            case (one, other):
                pair = pairs.index((min(one, other), max(one, other)))
                cost[ends[2] + pair] += transfer.seconds_per_share / scale
                if transfer.change is ChangeKind.SHIFT:
                    cost[ends[3] + pair] += transfer.fixed_seconds / scale
    return cost
