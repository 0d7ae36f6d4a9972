"""Best-first synthesis: the fastest program at given ratios.

A state is how far the program has come and in which layouts each tensor is at hand that is still to be read;
what nothing reads any more is removed, so that programs that differ only in their past meet. States are taken
by the least seconds that any end of theirs takes: what was spent, and the least work of all ops to come, which
no exchange makes less. That bound never falls along a program, so the first end that is taken is the fastest.
A state that another one serves for is dropped (`dominance`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from hetu_fx.planner.search.hap.dominance import State
from hetu_fx.planner.search.hap.expand import Expansion, OpChoice, OpMove
from hetu_fx.planner.search.hap.memory import HeldBytes
from hetu_fx.planner.search.hap.prices import Vector
from hetu_fx.planner.search.hap.span import Span

MOST_COMPARED = 24
"""A state is compared with so many others, those that came first."""

MOST_LABELS = 48
"""So many ways to a state, of unequal bytes, are followed where memory binds."""


MOST_STATES = 2048
"""So many states are followed over all ops of a stretch, each op's share of them those that took least."""

FEWEST_STATES = 16
"""However many ops there are, each may have so many."""


class Item(Protocol):
    """What is done in one go: an op, or a block; `most_entries` states it may be entered in, if not any."""

    @property
    def most_entries(self) -> int | None: ...

    @property
    def is_exact(self) -> bool: ...

    def moves(self, state: State) -> Iterable[OpMove]:
        """Return what can be done from a state."""
        ...

    @property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no move goes below."""
        ...


@dataclass(slots=True)
class Label:
    """A way to a state: its seconds, the bytes held, and the choices that lead there, last first."""

    layouts: State
    span: Span
    held: HeldBytes
    before: Label | None = None
    choices: tuple[OpChoice, ...] = ()

    def all_choices(self) -> tuple[OpChoice, ...]:
        """Return the choices from the start."""
        parts, label = [], self
        while label is not None:
            parts.append(label.choices)
            label = label.before  # type: ignore[assignment]
        return tuple(choice for part in reversed(parts) for choice in part)


@dataclass
class Frontier:
    """What was taken so far, by how far it has come."""

    expansion: Expansion
    taken: list[list[Label]]
    most: list[int]
    is_exact: bool = True

    def admits(self, label: Label, index: int) -> bool:
        """Tell whether a label is dropped, else take it."""
        others = self.taken[index]
        if any(self.expansion.dominance.serves(other, label) for other in others[:MOST_COMPARED]):
            return False
        if len(others) >= self.most[index]:
            self.is_exact = False
            return False
        if self.expansion.limits.bind and sum(other.layouts == label.layouts for other in others) >= MOST_LABELS:
            self.is_exact = False
            return False
        others.append(label)
        return True


def best_first(
    expansion: Expansion, items: Sequence[Item], start: Label, *, first_only: bool
) -> tuple[list[Label], Frontier]:
    """Return the ends of the items from a start, fastest first, and what was taken on the way.

    With `first_only` that is the fastest one; else all that some continuation may need.
    """
    share = max(FEWEST_STATES, MOST_STATES // max(1, len(items)))
    most = [min(share, item.most_entries or share) for item in items]
    frontier = Frontier(expansion, [[] for _ in range(len(items) + 1)], [*most, share])
    to_come = _sums_to_come(items, len(start.span.head))
    order = count()
    least: dict[tuple[int, State], float] = {}
    heap = [(start.span.least_seconds(to_come[0]), 0, next(order), start)]
    while heap:
        _, minus_index, _, label = heapq.heappop(heap)
        index = -minus_index
        if not frontier.admits(label, index):
            continue
        if index == len(items):
            if first_only:
                break
            continue
        for new in _following(expansion, items[index], label):
            if expansion.dominance.is_scalar and not expansion.limits.bind:
                key = index + 1, new.layouts
                if new.span.head[0] >= least.get(key, math.inf):
                    continue
                least[key] = new.span.head[0]
            bound = new.span.least_seconds(to_come[index + 1])
            heapq.heappush(heap, (bound, -index - 1, next(order), new))
    return frontier.taken[-1], frontier


def _following(expansion: Expansion, item: Item, label: Label) -> Iterator[Label]:
    for move in item.moves(label.layouts):
        held = label.held + move.held if expansion.limits.bind else label.held
        if expansion.limits.allow(held):
            yield Label(move.layouts, label.span.then(move.span), held, label, move.choices)


def _sums_to_come(items: Sequence[Item], width: int) -> list[Vector]:
    """Return the least work of the items from each on, and after the last."""
    sums: list[Vector] = [(0.0,) * width]
    for item in reversed(items):
        sums.append(tuple(map(float.__add__, sums[-1], item.least_work)))
    return sums[::-1]
