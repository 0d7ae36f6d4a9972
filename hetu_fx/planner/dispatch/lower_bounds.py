"""Bounds that no dispatch and no packing gets below, so that what is found can be judged.

For pipelines of schemes k (n_k of each) and sequences of lengths c, longest first (N_c of each), and dispatches
done by Z <= U, with U the seconds of some dispatch, let x_kc be the share of the sequences c that k gets, and
w_kc / Z how many pipelines of k have c as their longest. A pipeline whose longest is c has at most
Z (1 - (p_k - 1) t_k(c) / U) seconds of sequences, none longer than c, so that

    min Z  with  sum_k x_kc = 1,  sum_c w_kc <= n_k Z,  w_kc <= U N_c x_kc,               (1)
                 sum_{c' <= c} N_c' t_k(c') x_kc' <= sum_{c' <= c} (1 - (p_k - 1) t_k(c') / U) w_kc'

for every k and c is a linear programme that Z stays above; what cannot be done by U has x_kc = 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import block_array, coo_array, diags_array, eye_array, kron

from hetu_fx.planner.dispatch.strategy import Numbers, SequenceBatch, Strategy

_ROUNDING = 1e-6  # the solver's tolerance
_WITHOUT_SOLUTION = {2: 1.0}  # infeasible; a solver that gave up proves nothing


def dispatch_bound(strategy: Strategy, batch: SequenceBatch, at_most: float) -> float:
    """Return seconds that no dispatch of the batch to the strategy's pipelines stays below, `at_most` being known."""
    schemes, lengths = Counter(strategy.pipelines), Counter(sorted(batch.lengths, reverse=True))
    seconds = np.stack([scheme.times.all_seconds(lengths) for scheme in schemes])
    stages = np.array([[float(scheme.stages)] for scheme in schemes])
    may = np.array(list(lengths)) <= np.array([[scheme.max_length] for scheme in schemes])
    alone = np.where(may, stages * seconds, np.inf)
    pipelines, sequences = (np.array(list(group.values()), dtype=np.float64) for group in (schemes, lengths))
    least = float(alone.min(axis=0).max())
    if least >= at_most:
        return at_most
    relaxed = _Relaxed(seconds / at_most, stages - 1, alone <= at_most, pipelines, sequences)
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
        kinds, classes = self.work.shape
        every = kinds * classes
        each, per_kind = eye_array(every), kron(eye_array(kinds), np.ones((1, classes)))
        counts = np.tile(self.sequences, kinds)
        carried = kron(eye_array(kinds), eye_array(classes, k=-1)) - each
        free = diags_array(np.maximum(0.0, 1 - self.fill * self.work).ravel())
        done = diags_array(-counts * self.work.ravel())
        nothing, last = coo_array((kinds, every)), np.zeros((every, 1))
        per_length = kron(np.ones((1, kinds)), eye_array(classes))
        equal = block_array([[done, free, carried, last], [per_length, None, None, None]])
        upper = block_array(
            [[nothing, per_kind, nothing, -self.pipelines[:, None]], [diags_array(-counts), each, None, None]]
        )
        found = linprog(
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


def row_bound(seconds: Sequence[float], rows: int) -> float:
    """Return seconds that the slowest of so many rows cannot stay below; `seconds` fall.

    Rows share the work; and of the first k rows + 1 sequences some row gets k + 1, the least of them at least.
    """
    bound = sum(seconds) / rows
    for count in range(1, (len(seconds) - 1) // rows + 2):
        last = (count - 1) * rows + 1
        bound = max(bound, sum(seconds[last - count : last]))
    return bound
