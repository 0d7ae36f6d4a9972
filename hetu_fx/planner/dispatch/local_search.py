"""Items at receivers so that the last is done early, and how to make it sooner.

Receiver i that has the items Q is done after

    sum_{s in Q} t_i(s) + f_i max_{s in Q} t_i(s)                             (1)

and takes items while it may hold them and their tokens fit its room. `improved` moves items away from the last
receiver or exchanges them, while the two receivers concerned get done sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.planner.dispatch.strategy import Numbers

Indices = NDArray[np.int64]

EPSILON = 1e-9
"""Sooner means by this share."""


@dataclass(frozen=True, slots=True, eq=False)
class Assigning:
    """m receivers and n items, longest first.

    `seconds` (m, n) is t_i(s), `may` (m, n) which receiver can hold which item, `fill` (m,) is f_i, `room` (m,)
    and `tokens` (n,) bound the sum of tokens of a receiver.
    """

    seconds: Numbers
    may: NDArray[np.bool_]
    fill: Numbers
    room: Numbers
    tokens: Numbers

    def part(self, receivers: Indices, items: Indices) -> Assigning:
        """Return the problem of some receivers and items only."""
        both = np.ix_(receivers, items)
        few = (self.fill[receivers], self.room[receivers], self.tokens[items])
        return Assigning(self.seconds[both], self.may[both], *few)


def done_seconds(problem: Assigning, receivers: Indices) -> Numbers:
    """Return (1) for each receiver."""
    held = _held(problem, receivers)
    longest = held.max(axis=1, initial=0.0)
    result: Numbers = held.sum(axis=1) + problem.fill * longest
    return result


def improved(problem: Assigning, receivers: Indices) -> Indices:
    """Move or exchange items of the last receiver while that helps.

    The sorted list of (1) falls in every round, so this ends.
    """
    while (better := _Round(problem, receivers).step()) is not None:
        receivers = better
    return receivers


class _Round:
    """What follows from the receivers of a round: what each holds, and what it would be without one item."""

    def __init__(self, problem: Assigning, receivers: Indices) -> None:
        self._problem, self._receivers = problem, receivers
        held = _held(problem, receivers)
        self._total = held.sum(axis=1)
        two = np.sort(held, axis=1)[:, -2:] if held.shape[1] > 1 else np.pad(held, ((0, 0), (1, 0)))
        done = self._total + problem.fill * two[:, 1]
        self._last, self._done = int(done.argmax()), float(done.max())
        self._room = problem.room - np.bincount(receivers, problem.tokens, len(problem.fill))
        own = held[receivers, np.arange(len(receivers))]
        self._rest_total = self._total[receivers] - own
        self._longest, self._rest_longest = two[:, 1], two[receivers, np.where(own == two[receivers, 1], 0, 1)]

    def step(self) -> Indices | None:
        """Return the receivers after the best move or exchange, or None when none gets done sooner."""
        items = np.flatnonzero(self._receivers == self._last)
        moved, exchanged = self._after_moves(items), self._after_exchanges(items)
        bound = self._done * (1 - EPSILON)
        if min(moved.min(), exchanged.min()) >= bound:
            return None
        result = self._receivers.copy()
        if moved.min() <= exchanged.min():
            row, to = np.unravel_index(moved.argmin(), moved.shape)
            result[items[row]] = to
        else:
            row, other = np.unravel_index(exchanged.argmin(), exchanged.shape)
            result[items[row]], result[other] = self._receivers[other], self._last
        return result

    def _after_moves(self, items: Indices) -> Numbers:
        """Return (items, m): when the later of the two is done after an item goes to a receiver."""
        problem = self._problem
        left = self._rest_total[items] + problem.fill[self._last] * self._rest_longest[items]
        taken = problem.seconds[:, items].T
        there = self._total + taken + problem.fill * np.maximum(self._longest, taken)
        after: Numbers = np.maximum(left[:, None], there)
        after[~problem.may[:, items].T | (self._room < problem.tokens[items, None])] = np.inf
        after[:, self._last] = np.inf
        return after

    def _after_exchanges(self, items: Indices) -> Numbers:
        """Return (items, n): when the later of the two is done after an item is exchanged for another one."""
        problem, last, theirs = self._problem, self._last, self._receivers
        given, taken = problem.seconds[theirs][:, items].T, problem.seconds[last]
        here = self._rest_total[items, None] + taken
        here += problem.fill[last] * np.maximum(self._rest_longest[items, None], taken)
        there = self._rest_total + given + problem.fill[theirs] * np.maximum(self._rest_longest, given)
        after: Numbers = np.maximum(here, there)
        more = problem.tokens - problem.tokens[items, None]  # tokens that come here more than go
        misfit = (more > self._room[last]) | (-more > self._room[theirs])
        after[misfit | ~problem.may[last] | ~problem.may[theirs][:, items].T | (theirs == last)] = np.inf
        return after


def _held(problem: Assigning, receivers: Indices) -> Numbers:
    """Return (m, n): the seconds of each item at its receiver, 0 elsewhere."""
    held = np.zeros_like(problem.seconds)
    every = np.arange(len(receivers))
    held[receivers, every] = problem.seconds[receivers, every]
    return held
