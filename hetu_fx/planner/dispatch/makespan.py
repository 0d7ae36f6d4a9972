"""Items to receivers so that the last is done early: what dispatching and packing have in common.

Receiver i that has the items Q is done after

    sum_{s in Q} t_i(s) + f_i max_{s in Q} t_i(s)                             (1)

and takes items while it may hold them and their tokens fit its room.

Longest-first and seeded shuffles are placed greedily, each item where its receiver is done soonest, all orders at once;
neither wins always. Where the longest item of a receiver costs extra, longest-first is also tried with seeded caps on
the receivers, which brings long items together. The best is improved: items of the last receiver are moved away or
exchanged, while the two receivers concerned get done sooner. Then the items of the last and of one or two other
receivers are placed anew in the same ways, until a bound is close or enough was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetu_fx.planner.dispatch.scheme_costs import Numbers, Scheme

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

    @classmethod
    def of(cls, schemes: Sequence[Scheme], seconds: Sequence[Numbers], lengths: Sequence[int]) -> Assigning:
        """Return the problem of sequences, longest first, and pipelines, of which each takes so many seconds for them.

        A pipeline holds rows of some length, whatever they have in all.
        """
        tokens = np.array(lengths, dtype=np.float64)
        return cls(
            seconds=np.stack(seconds),
            may=tokens <= np.array([[scheme.max_length] for scheme in schemes]),
            fill=np.array([scheme.fill for scheme in schemes]),
            room=np.full(len(schemes), np.inf),
            tokens=tokens,
        )

    def part(self, receivers: Indices, items: Indices) -> Assigning:
        """Return the problem of some receivers and items only."""
        both = np.ix_(receivers, items)
        few = (self.fill[receivers], self.room[receivers], self.tokens[items])
        return Assigning(self.seconds[both], self.may[both], *few)


def _done_seconds(problem: Assigning, receivers: Indices) -> Numbers:
    """Return (1) for each receiver."""
    held = _held(problem, receivers)
    longest = held.max(axis=1, initial=0.0)
    result: Numbers = held.sum(axis=1) + problem.fill * longest
    return result


def _improve_assignment(problem: Assigning, receivers: Indices) -> Indices:
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


_CLOSE = 1e-3  # a bound is close when it is missed by this share
_MOST_OTHERS = 2
_UNCAPPED = 0.5  # the share of receivers that take items of any length


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try: so many seeded shuffles and caps, and so many items that may be placed anew.

    `bound` is told when the last is done at first, and returns what no assignment gets below.
    """

    restarts: int
    seed: int
    bound: Callable[[float], float]
    renewed_items: int


def assign(problem: Assigning, effort: Effort) -> Indices | None:
    """Return the receiver of each item, or None when no order could be placed."""
    random = np.random.default_rng(effort.seed)
    receivers = _best_placed(problem, effort.restarts, random)
    if receivers is None or len(problem.fill) == 1:
        return receivers
    enough = (1 + _CLOSE) * effort.bound(_last_done(problem, receivers))
    placed = 0
    while placed < effort.renewed_items and _last_done(problem, receivers) > enough:
        few = _last_and_others(problem, receivers, random)
        items = np.flatnonzero(np.isin(receivers, few))
        anew = _best_placed(problem.part(few, items), effort.restarts, random)
        receivers = receivers if anew is None else _better(problem, receivers, items, few[anew])
        placed += len(items)
    return receivers


def _last_done(problem: Assigning, receivers: Indices) -> float:
    return float(_done_seconds(problem, receivers).max())


def _better(problem: Assigning, receivers: Indices, items: Indices, anew: Indices) -> Indices:
    """Return the receivers with those of some items anew, improved, or as they were when that is no better."""
    result = receivers.copy()
    result[items] = anew
    before, after = (np.sort(_done_seconds(problem, each))[::-1] for each in (receivers, result))
    differs = np.flatnonzero(np.abs(after - before) > EPSILON * before[0])
    return (
        _improve_assignment(problem, result) if len(differs) and after[differs[0]] < before[differs[0]] else receivers
    )


def _best_placed(problem: Assigning, restarts: int, random: np.random.Generator) -> Indices | None:
    """Return the best of all orders, improved, or None when none could be placed."""
    orders, caps = _orders(problem, restarts, random), np.full((1 + restarts, len(problem.fill)), np.inf)
    if problem.fill.any():
        orders = np.concatenate([orders, np.tile(orders[0], (restarts, 1))])
        caps = np.concatenate([caps, _caps(problem, restarts, random)])
    receivers, done = _place(problem, orders, caps)
    best = int(done.argmin())
    return _improve_assignment(problem, receivers[best]) if np.isfinite(done[best]) else None


def _last_and_others(problem: Assigning, receivers: Indices, random: np.random.Generator) -> Indices:
    """Return the last receiver, and one or more others at random."""
    done = _done_seconds(problem, receivers)
    others = random.permutation(np.delete(np.arange(len(done)), done.argmax()))
    few: Indices = np.append(done.argmax(), others[: random.integers(1, _MOST_OTHERS + 1)])
    return few


def _orders(problem: Assigning, restarts: int, random: np.random.Generator) -> Indices:
    """Return orders of the items (1 + restarts, n): longest first, then shuffles with what has least choice first."""
    count = problem.seconds.shape[1]
    shuffles = random.permuted(np.tile(np.arange(count), (restarts, 1)), axis=1)
    choice = problem.may.sum(axis=0)
    ranked = np.argsort(choice[shuffles], axis=1, kind="stable")
    orders: Indices = np.concatenate([np.arange(count)[None], np.take_along_axis(shuffles, ranked, axis=1)])
    return orders


def _caps(problem: Assigning, restarts: int, random: np.random.Generator) -> Numbers:
    """Return tokens (restarts, m) that the items of a receiver may have: those of a long item, or any number."""
    shape, count = (restarts, len(problem.fill)), len(problem.tokens)
    caps = problem.tokens[(count * random.random(shape) ** 2).astype(np.int64)]
    return np.where(random.random(shape) < _UNCAPPED, np.inf, caps)


def _place(problem: Assigning, orders: Indices, caps: Numbers) -> tuple[Indices, Numbers]:
    """Place each order greedily; return the receivers (orders, n) and when the last is done, infinity if stuck."""
    runs = np.arange(len(orders))
    shape = (len(orders), len(problem.fill))
    total, longest, done = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    room = np.tile(problem.room, (len(orders), 1))
    receivers = np.empty_like(orders)
    every_seconds, cannot = problem.seconds.T, ~problem.may.T
    for items in orders.T:
        seconds, tokens = every_seconds[items], problem.tokens[items]
        after_longest = np.maximum(longest, seconds)
        after = total + seconds + problem.fill * after_longest
        after[cannot[items] | (np.minimum(room, caps) < tokens[:, None])] = np.inf
        to = after.argmin(axis=1)
        done[runs, to] = soonest = after[runs, to]
        total[runs, to] += np.where(np.isinf(soonest), np.inf, seconds[runs, to])  # stuck for good
        longest[runs, to] = after_longest[runs, to]
        room[runs, to] -= tokens
        receivers[runs, items] = to
    return receivers, done.max(axis=1)
