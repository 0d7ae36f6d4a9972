"""Best-first synthesis: the fastest program at given ratios.

A state is how far the program has come and in which layouts each tensor is at hand that is still to be read;
what nothing reads any more is removed, so that programs that differ only in their past meet. States are taken
by the least seconds that any end of theirs takes: what was spent, and the least work of all ops to come, which
no exchange makes less. That bound never falls along a program, so the first end that is taken is the fastest.

A state is dropped when another one as far is no slower even after it has changed its layouts to those of the
first: whatever follows the first can follow the other. With limits of memory it must hold no more, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, Protocol

from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.prices import RatioPrices, Vector
from hetu_fx.planner.search.hap.tensor_states import HeldBytes, Layout, Limits, held_bytes_after
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram

MOST_COMPARED = 24
"""A state is compared with so many others, those that came first."""

MOST_LABELS = 48
"""So many ways to a state, of unequal bytes, are followed where memory binds."""


MOST_STATES = 2048
"""So many states are followed over all ops of a stretch, each op's share of them those that took least."""

FEWEST_STATES = 16
"""However many ops there are, each may have so many."""

Layouts = tuple[Layout, ...]
"""The layouts in which a tensor is at hand: that in which it was made first."""


State = tuple[tuple[str, Layouts], ...]
"""Tensors at hand with their layouts, by name."""


class Span(NamedTuple):
    """Seconds of a stretch of a program that can be joined with what stands before and after it.

    Work between two exchanges of activations is waited for at their end: seconds are the largest sum over that stage. A
    stretch whose ends are open has (a, m, z): by device the work before its first exchange, all up to its last one, and
    the work after that; without an exchange it has a alone, `middle` is None and `tail` empty. Joined,
    (a, m, z) (a', m', z') = (a, m + max(z + a') + m', z'), so that N equal stretches need be searched once (min-plus).
    """

    head: Vector
    middle: float | None = None
    tail: Vector = ()

    @property
    def seconds(self) -> float:
        """Return the seconds of the stretch alone."""
        return max(self.head) + (0.0 if self.middle is None else self.middle + max(self.tail))

    def then(self, other: Span) -> Span:
        """Return the stretch and another one after it."""
        if self.middle is None:
            return Span(_add(self.head, other.head), other.middle, other.tail)
        joined = _add(self.tail, other.head)
        if other.middle is None:
            return Span(self.head, self.middle, joined)
        return Span(self.head, self.middle + max(joined) + other.middle, other.tail)

    def least_seconds(self, to_come: Vector) -> float:
        """Return what no continuation goes below in which the devices have so much work to come."""
        if self.middle is None:
            return max(_add(self.head, to_come))
        return max(self.head) + self.middle + max(_add(self.tail, to_come))

    def is_never_later(self, other: Span, extra: float = 0.0) -> bool:
        """Tell whether it takes no longer than another, whatever stands before and after, even with `extra`.

        `extra` is seconds of exchanges at its end, that the other one does not need. With one device that can
        be the slowest that is exact; else it may say no where yes is true, when there is an extra.
        """
        if len(self.head) == 1:
            return self.seconds + extra <= other.seconds * _SLIGHTLY_MORE
        if extra > 0:
            return self._with_exchange(extra).is_never_later(other)
        if self.middle is None:
            ends = other.head if other.middle is None else _add(other.head, other.tail)
            return _lead(self.head, ends) <= (other.middle or 0.0)
        if other.middle is None:
            return False
        late = _lead(self.head, other.head) + _lead(self.tail, other.tail)
        return late + self.middle <= other.middle * _SLIGHTLY_MORE

    def _with_exchange(self, seconds: float) -> Span:
        nothing = (0.0,) * len(self.head)
        return self.then(Span(nothing, seconds, nothing))


_SLIGHTLY_MORE = 1 + 1e-12


def _lead(one: Vector, other: Vector) -> float:
    return max(a - b for a, b in zip(one, other, strict=True))


def _add(one: Vector, other: Vector) -> Vector:
    return tuple(map(float.__add__, one, other))


class OpChoice(NamedTuple):
    """How an op is done, by numbers, so that it can be told of an equal op of another block."""

    op: int
    form: int
    homes: tuple[tuple[str, Layout], ...]
    changes: tuple[tuple[str, Layout, Layout], ...]


class Stretch(NamedTuple):
    """A stretch of a program: an op, a block, or all from the start on.

    Attributes:
        layouts: those of what it touched, or of all that is at hand after it.
        span: its seconds.
        held: bytes that are held more after it.
        choices: how its ops are done, those of the last move only where something is `before`.
        before: the stretch that was gone on from.
    """

    layouts: State
    span: Span
    held: HeldBytes
    choices: tuple[OpChoice, ...] = ()
    before: Stretch | None = None

    def then(self, move: Stretch) -> Stretch:
        """Return the stretch and a move after it, which says what is at hand then."""
        return Stretch(move.layouts, self.span.then(move.span), self.held + move.held, move.choices, self)

    def all_choices(self) -> tuple[OpChoice, ...]:
        """Return the choices from the start."""
        parts: list[tuple[OpChoice, ...]] = []
        stretch: Stretch | None = self
        while stretch is not None:
            parts.append(stretch.choices)
            stretch = stretch.before
        return tuple(choice for part in reversed(parts) for choice in part)


@dataclass(frozen=True)
class Dominance:
    """Compares states of a problem at given prices."""

    problem: TensorProgram
    prices: RatioPrices
    rules: SynthesisRules
    limits: Limits
    _distances: dict[tuple[str, Layouts, Layouts], tuple[float, HeldBytes] | None] = field(
        default_factory=dict, repr=False
    )

    def serves(self, one: Stretch, other: Stretch) -> bool:
        """Tell whether all that can follow the other can follow the one, no later and with no more bytes.

        That is so when the one, its layouts changed to have those of the other too, is still no later.
        """
        if self.is_scalar and one.span.head[0] > other.span.head[0]:
            return False
        extra, more = 0.0, HeldBytes()
        if one.layouts != other.layouts:
            found = self._distance(one.layouts, other.layouts)
            if found is None:
                return False
            extra, more = found
        if self.limits.bind:
            held = one.held + more
            if held.copied > other.held.copied or held.spread > other.held.spread:
                return False
        return one.span.is_never_later(other.span, extra)

    @property
    def is_scalar(self) -> bool:
        """Tell whether one device stands for all."""
        return len(self.prices.per_flop) == 1

    def _distance(self, one: State, other: State) -> tuple[float, HeldBytes] | None:
        """Return seconds and bytes of changing the one's layouts to have all of the other's."""
        seconds, held = 0.0, HeldBytes()
        for (name, have), (same, wanted) in zip(one, other, strict=True):
            assert name == same
            if have != wanted:
                found = self._tensor_distance(name, have, wanted)
                if found is None:
                    return None
                seconds += found[0]
                held = held + found[1] if self.limits.bind else held
        return seconds, held

    def _tensor_distance(self, name: str, have: Layouts, wanted: Layouts) -> tuple[float, HeldBytes] | None:
        key = name, have, wanted
        if key not in self._distances:
            self._distances[key] = self._find_distance(self.problem.by_name[name], have, wanted)
        return self._distances[key]

    def _find_distance(self, tensor: Tensor, have: Layouts, wanted: Layouts) -> tuple[float, HeldBytes] | None:
        if self.rules.one_change or not tensor.movable:
            return None
        seconds, held = 0.0, HeldBytes()
        for layout in set(wanted) - set(have):
            options = [self.change_seconds(tensor, source, layout) for source in have]
            known = [option for option in options if option is not None]
            if not known:
                return None
            seconds += min(known)
            held += held_bytes_after(tensor, layout)
        return seconds, held

    def change_seconds(self, tensor: Tensor, source: Layout, target: Layout) -> float | None:
        """Return the seconds of a change of layout; None if it cannot be."""
        transfers = self.prices.change(tensor, source, target)
        return None if transfers is None else self.prices.seconds(transfers)


class Item(Protocol):
    """What is done in one go: an op, or a block; `most_entries` states it may be entered in, if not any."""

    @property
    def most_entries(self) -> int | None: ...

    @property
    def is_exact(self) -> bool: ...

    def moves(self, state: State) -> Iterable[Stretch]:
        """Return what can be done from a state."""
        ...

    @property
    def least_work(self) -> Vector:
        """Return seconds on each device that can be the slowest that no move goes below."""
        ...


@dataclass
class Frontier:
    """What was taken so far, by how far it has come, and whether nothing was left out."""

    dominance: Dominance
    taken: list[list[Stretch]]
    most: list[int]
    is_exact: bool = True

    def admits(self, found: Stretch, index: int) -> bool:
        """Tell whether a stretch is taken; else it is dropped."""
        others = self.taken[index]
        if any(self.dominance.serves(other, found) for other in others[:MOST_COMPARED]):
            return False
        if len(others) >= self.most[index]:
            self.is_exact = False
            return False
        if self.dominance.limits.bind and sum(other.layouts == found.layouts for other in others) >= MOST_LABELS:
            self.is_exact = False
            return False
        others.append(found)
        return True


def best_first(
    dominance: Dominance, items: Sequence[Item], start: Stretch, *, first_only: bool
) -> tuple[list[Stretch], Frontier]:
    """Return the ends of the items from a start, fastest first, and what was taken on the way.

    With `first_only` that is the fastest one; else all that some continuation may need.
    """
    share = max(FEWEST_STATES, MOST_STATES // max(1, len(items)))
    most = [min(share, item.most_entries or share) for item in items]
    frontier = Frontier(dominance, [[] for _ in range(len(items) + 1)], [*most, share])
    to_come = _sums_to_come(items, len(start.span.head))
    order = count()
    least: dict[tuple[int, State], float] = {}
    heap = [(start.span.least_seconds(to_come[0]), 0, next(order), start)]
    while heap:
        _, minus_index, _, found = heapq.heappop(heap)
        index = -minus_index
        if not frontier.admits(found, index):
            continue
        if index == len(items):
            if first_only:
                break
            continue
        for new in map(found.then, items[index].moves(found.layouts)):
            if not dominance.limits.allow(new.held):
                continue
            if dominance.is_scalar and not dominance.limits.bind:
                key = index + 1, new.layouts
                if new.span.head[0] >= least.get(key, math.inf):
                    continue
                least[key] = new.span.head[0]
            bound = new.span.least_seconds(to_come[index + 1])
            heapq.heappush(heap, (bound, -index - 1, next(order), new))
    return frontier.taken[-1], frontier


def _sums_to_come(items: Sequence[Item], width: int) -> list[Vector]:
    """Return the least work of the items from each on, and after the last."""
    sums: list[Vector] = [(0.0,) * width]
    for item in reversed(items):
        sums.append(tuple(map(float.__add__, sums[-1], item.least_work)))
    return sums[::-1]


def block_description(problem: TensorProgram, start: int, stop: int) -> tuple[tuple[str, ...], Hashable]:
    """Return the tensors that ops touch, in order of appearance, and what makes equal blocks equal."""
    ops = problem.ops[start:stop]
    names = tuple(dict.fromkeys(name for op in ops for name in (*op.reads, *op.makes)))
    numbers = {name: number for number, name in enumerate(names)}
    made_here = {name for op in ops for name in op.makes}
    tensors = tuple(
        (
            replace(problem.by_name[name], name=""),
            name in made_here,
            problem.last_use.get(name, -1) >= stop,
            problem.first_use.get(name, start) < start,
        )
        for name in names
    )
    return names, (tensors, tuple(_op_description(op, numbers) for op in ops))


def _op_description(op: Op, numbers: Mapping[str, int]) -> Hashable:
    """Return an op with its tensors and factors by number."""
    factors = {
        name: str(i) for i, name in enumerate(dict.fromkeys(f for dims in (*op.operands, *op.results) for f in dims))
    }
    return replace(
        op,
        name="",
        reads=tuple(str(numbers[name]) for name in op.reads),
        makes=tuple(str(numbers[name]) for name in op.makes),
        operands=tuple(tuple(factors[f] for f in dims) for dims in op.operands),
        results=tuple(tuple(factors[f] for f in dims) for dims in op.results),
        whole=frozenset(factors[f] for f in op.whole if f in factors),
    )
