"""Which pipeline of a strategy gets which sequence: the first of the two stages of Hydraulis' data assignment.

The sequences go to pipelines that can hold them, so that the last pipeline is done early by (4) of the cost
model. As in Hydraulis' planner, seeded shuffles are placed greedily. Left is that planner where it gives up a
strategy with a pipeline that gets nothing (here that pipeline idles) and where it ends with the shuffles:
longest-first competes with them, and the best is improved.

A bound that no dispatch gets below tells how good that is. For pipelines of schemes k (n_k of each) and sequences of
lengths c, longest first (N_c of each), and dispatches done by Z <= U, with U the seconds of some dispatch, let x_kc be
the share of the sequences c that k gets, and w_kc / Z how many pipelines of k have c as their longest. A pipeline whose
longest is c has at most Z (1 - (p_k - 1) t_k(c) / U) seconds of sequences, none longer than c, so that

    min Z  with  sum_k x_kc = 1,  sum_c w_kc <= n_k Z,  w_kc <= U N_c x_kc,               (1)
                 sum_{c' <= c} N_c' t_k(c') x_kc' <= sum_{c' <= c} (1 - (p_k - 1) t_k(c') / U) w_kc'

for every k and c is a linear programme that Z stays above; what cannot be done by U has x_kc = 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # whose parts are imported when they are first used
from numpy.typing import NDArray

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.makespan import Assigning, Effort, assign
from hetu_fx.planner.dispatch.scheme_costs import Numbers, Scheme, SequenceBatch, Strategy, check_each_once, check_holds

_ROUNDING = 1e-6  # the solver's tolerance
_WITHOUT_SOLUTION = {2: 1.0}  # infeasible; a solver that gave up proves nothing


def _dispatch_bound(strategy: Strategy, batch: SequenceBatch, at_most: float) -> float:
    """Return seconds that no dispatch of the batch to the strategy's pipelines stays below, `at_most` being known."""
    schemes, lengths = Counter(strategy.pipelines), Counter(sorted(batch.lengths, reverse=True))
    seconds = np.stack([scheme.times.all_seconds(lengths) for scheme in schemes])
    fill = np.array([[scheme.fill] for scheme in schemes])
    may = np.array(list(lengths)) <= np.array([[scheme.max_length] for scheme in schemes])
    alone = np.where(may, (fill + 1) * seconds, np.inf)
    pipelines, sequences = (np.array(list(group.values()), dtype=np.float64) for group in (schemes, lengths))
    least = float(alone.min(axis=0).max())
    if least >= at_most:
        return at_most
    relaxed = _Relaxed(seconds / at_most, fill, alone <= at_most, pipelines, sequences)
    return max(least, at_most * (relaxed.seconds() - _ROUNDING))


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxed:
    """The programme (1) in units of U; the unknowns are x, w, what is left of the last line of (1), and Z."""

    work: Numbers
    fill: Numbers
    may: NDArray[np.bool_]
    pipelines: Numbers
    sequences: Numbers

    def seconds(self) -> float:
        """Return the least Z; 1 when nothing is done by U, 0 when that is not known."""
        sparse = scipy.sparse
        kinds, classes = self.work.shape
        every = kinds * classes
        each, per_kind = sparse.eye_array(every), sparse.kron(sparse.eye_array(kinds), np.ones((1, classes)))
        counts = np.tile(self.sequences, kinds)
        carried = sparse.kron(sparse.eye_array(kinds), sparse.eye_array(classes, k=-1)) - each
        free = sparse.diags_array(np.maximum(0.0, 1 - self.fill * self.work).ravel())
        done = sparse.diags_array(-counts * self.work.ravel())
        nothing, last = sparse.coo_array((kinds, every)), np.zeros((every, 1))
        per_length = sparse.kron(np.ones((1, kinds)), sparse.eye_array(classes))
        equal = sparse.block_array([[done, free, carried, last], [per_length, None, None, None]])
        upper = sparse.block_array(
            [[nothing, per_kind, nothing, -self.pipelines[:, None]], [sparse.diags_array(-counts), each, None, None]]
        )
        found = scipy.optimize.linprog(
            np.eye(1, 3 * every + 1, 3 * every).ravel(),
            A_ub=upper,
            b_ub=np.zeros(upper.shape[0]),
            A_eq=equal,
            b_eq=np.concatenate([np.zeros(every), np.ones(classes)]),
            bounds=np.stack([np.zeros(3 * every + 1), self._highest()], axis=1),
            method="highs",
        )
        return float(found.fun) if found.success else _WITHOUT_SOLUTION.get(found.status, 0.0)

    def _highest(self) -> Numbers:
        shares = self.may.ravel().astype(np.float64)
        most = np.where(self.may, self.pipelines[:, None], 0.0).ravel()
        return np.concatenate([shares, most, np.full(shares.size, np.inf), [1.0]])


RESTARTS = 50
"""How many shuffles Hydraulis' planner places."""

_RENEWED_ITEMS = 500  # so many sequences are dispatched anew at most


@dataclass(frozen=True)
class Dispatch:
    """The positions in the batch of the sequences of each pipeline, every sequence exactly once.

    No dispatch of the batch to the strategy gets below `bound_seconds`.
    """

    strategy: Strategy
    batch: SequenceBatch
    pipelines: tuple[tuple[int, ...], ...]
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.pipelines) != len(self.strategy.pipelines):
            counts = f"{len(self.pipelines)} groups of sequences for the {len(self.strategy.pipelines)} pipelines"
            raise PlanError(f"a dispatch has {counts} of {self.strategy}\nhint: give one each, empty where one idles")
        check_each_once("a dispatch", self.pipelines, len(self.batch.lengths))
        for scheme, group in zip(self.strategy.pipelines, self.pipelines, strict=True):
            _check_lengths(scheme, {position: self.batch.lengths[position] for position in group})

    @property
    def pipeline_seconds(self) -> tuple[float, ...]:
        """Return (4) of the cost model for each pipeline."""
        pairs = zip(self.strategy.pipelines, self.pipelines, strict=True)
        return tuple(unpacked_seconds(scheme, [self.batch.lengths[i] for i in group]) for scheme, group in pairs)

    @property
    def seconds(self) -> float:
        """Return when the last pipeline is done, its sequences yet to be packed."""
        return max(self.pipeline_seconds)


def unpacked_seconds(scheme: Scheme, lengths: Sequence[int]) -> float:
    """Return (4) of the cost model: what a pipeline needs for these sequences however they are packed."""
    return scheme.done([scheme.times.seconds(length) for length in lengths])


def dispatch(strategy: Strategy, batch: SequenceBatch, *, restarts: int = RESTARTS, seed: int = 0) -> Dispatch:
    """Return the best dispatch found; the same for a seed, whatever the order of the batch.

    Raises `PlanError` when no pipeline can hold the longest sequence.
    """
    check_holds(strategy, batch)
    bound = math.inf  # of one pipeline nothing is asked

    def bound_below(seconds: float) -> float:
        nonlocal bound
        bound = _dispatch_bound(strategy, batch, seconds)
        return bound

    falling = sorted(batch.lengths, reverse=True)
    seconds = {scheme: scheme.times.all_seconds(falling) for scheme in set(strategy.pipelines)}
    problem = Assigning.of(strategy.pipelines, [seconds[scheme] for scheme in strategy.pipelines], falling)
    receivers = assign(problem, Effort(restarts, seed, bound_below, _RENEWED_ITEMS))
    assert receivers is not None  # the first pipeline holds everything
    groups: list[list[int]] = [[] for _ in strategy.pipelines]
    for length, receiver in zip(falling, receivers.tolist(), strict=True):
        groups[receiver].append(length)
    return of_lengths(strategy, batch, groups, bound)


def of_lengths(
    strategy: Strategy, batch: SequenceBatch, groups: Sequence[Sequence[int]], bound_seconds: float
) -> Dispatch:
    """Return the dispatch that gives each pipeline sequences of these lengths, of equal ones the earlier first."""
    positions: dict[int, list[int]] = {}
    for position in reversed(range(len(batch.lengths))):
        positions.setdefault(batch.lengths[position], []).append(position)
    pipelines = tuple(tuple(positions[length].pop() for length in group) for group in groups)
    found = Dispatch(strategy, batch, pipelines)
    return replace(found, bound_seconds=min(bound_seconds, found.seconds))


def _check_lengths(scheme: Scheme, lengths: dict[int, int]) -> None:
    long = {position: length for position, length in lengths.items() if length > scheme.max_length}
    if long:
        raise PlanError(
            f"a dispatch gives {scheme} sequences of {long} tokens (by position), but it holds at most "
            f"{scheme.max_length}\nhint: give them to a pipeline that holds them"
        )
