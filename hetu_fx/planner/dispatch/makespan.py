"""Items to receivers so that the last is done early: what dispatching and packing have in common.

Longest-first and seeded shuffles are placed greedily, each item where its receiver is done soonest, all orders
at once; neither wins always. Where the longest item of a receiver costs extra, longest-first is also tried with
seeded caps on the receivers, which brings long items together. The best is improved by moves and exchanges, and
then by placing the items of the last and of one or two other receivers anew in the same ways, until a bound is
close or enough was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetu_fx.planner.dispatch.local_search import EPSILON, Assigning, Indices, done_seconds, improved
from hetu_fx.planner.dispatch.strategy import Numbers

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
    return float(done_seconds(problem, receivers).max())


def _better(problem: Assigning, receivers: Indices, items: Indices, anew: Indices) -> Indices:
    """Return the receivers with those of some items anew, improved, or as they were when that is no better."""
    result = receivers.copy()
    result[items] = anew
    before, after = (np.sort(done_seconds(problem, each))[::-1] for each in (receivers, result))
    differs = np.flatnonzero(np.abs(after - before) > EPSILON * before[0])
    return improved(problem, result) if len(differs) and after[differs[0]] < before[differs[0]] else receivers


def _best_placed(problem: Assigning, restarts: int, random: np.random.Generator) -> Indices | None:
    """Return the best of all orders, improved, or None when none could be placed."""
    orders, caps = _orders(problem, restarts, random), np.full((1 + restarts, len(problem.fill)), np.inf)
    if problem.fill.any():
        orders = np.concatenate([orders, np.tile(orders[0], (restarts, 1))])
        caps = np.concatenate([caps, _caps(problem, restarts, random)])
    receivers, done = _place(problem, orders, caps)
    best = int(done.argmin())
    return improved(problem, receivers[best]) if np.isfinite(done[best]) else None


def _last_and_others(problem: Assigning, receivers: Indices, random: np.random.Generator) -> Indices:
    """Return the last receiver, and one or more others at random."""
    done = done_seconds(problem, receivers)
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
