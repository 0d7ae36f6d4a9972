"""The strategy of a pool that does a batch soonest, with the micro-batches of all its pipelines.

What benchmarks compare with the published numbers; a run chooses among variants (`planner.dispatch.policies`).
As Hydraulis' planner does in every step: strategies that cannot hold the longest sequence are left out, the
others get a dispatch, their pipelines a packing, and the one whose last pipeline is done first is chosen. It is
left where a dispatch is refined with the packing in view, and where strategies are not packed whose bound on
any dispatch, which no packing gets below either, is later than what another one needs.

A dispatch alone knows nothing of what its sequences cost when they are packed, where rows are not all full, not all
alike, and cost something each. Refined, the last pipeline, packed quickly, gives sequences away or exchanges them,
drawn by a seed, as long as it and the other one get done sooner.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.dispatch import Dispatch, dispatch, of_lengths, unpacked_seconds
from hetu_fx.planner.dispatch.pack import Packing, packings
from hetu_fx.planner.dispatch.row_dispatch import quick_rows
from hetu_fx.planner.dispatch.scheme_costs import Scheme, SequenceBatch, Strategy, too_long
from hetu_fx.planner.search.hydraulis.adapter import schemes_with_lengths


@dataclass(frozen=True, slots=True)
class Considered:
    """A strategy that can hold the batch: seconds by its dispatch, and packed, None where that could not win."""

    strategy: Strategy
    dispatch_seconds: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """What is done with a batch: a dispatch, and the packing of each of its pipelines.

    `considered` tells of every strategy that could hold the batch, soonest dispatch first.
    """

    dispatch: Dispatch
    packings: tuple[Packing, ...]
    considered: tuple[Considered, ...] = ()

    def __post_init__(self) -> None:
        given = [(packing.scheme, packing.lengths) for packing in self.packings]
        if given != schemes_with_lengths(self.dispatch):
            raise PlanError(
                f"the packings are of {[(str(scheme), lengths) for scheme, lengths in given]}, which are not the "
                f"pipelines of the dispatch; pack the sequences that each pipeline has there"
            )

    @property
    def strategy(self) -> Strategy:
        """Return the strategy that was chosen."""
        return self.dispatch.strategy

    @property
    def seconds(self) -> float:
        """Return when the last pipeline is done."""
        return max(packing.seconds for packing in self.packings)

    @property
    def micro_batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return, for each pipeline, the positions in the batch of the sequences of each row."""
        pairs = zip(self.packings, self.dispatch.pipelines, strict=True)
        return tuple(tuple(tuple(group[i] for i in row) for row in packing.rows) for packing, group in pairs)


def choose(strategies: Iterable[Strategy], batch: SequenceBatch, *, seed: int = 0) -> BatchChoice:
    """Return the strategy that does the batch soonest, dispatched and packed; the first of equal ones.

    The same for a seed, whatever the order of the batch. Raises `PlanError` when no strategy can hold the
    longest sequence.
    """
    dispatches = [dispatch(strategy, batch, seed=seed) for strategy in holding(strategies, batch)]
    dispatches.sort(key=lambda one: one.seconds)
    best: BatchChoice | None = None
    considered = []
    for one in dispatches:
        found = packed(refine(one, seed=seed), seed=seed) if best is None or one.bound_seconds < best.seconds else None
        considered.append(Considered(one.strategy, one.seconds, None if found is None else found.seconds))
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    assert best is not None  # `holding` returned one at least, and the first is packed
    return BatchChoice(best.dispatch, best.packings, tuple(considered))


def holding(strategies: Iterable[Strategy], batch: SequenceBatch) -> tuple[Strategy, ...]:
    """Return the different strategies that can hold the longest sequence; raise `PlanError` when there is none."""
    given = tuple(dict.fromkeys(strategies))
    found = tuple(strategy for strategy in given if strategy.max_length >= batch.longest)
    if not found:
        raise too_long(batch, "none of the strategies holds", max((s.max_length for s in given), default=0))
    return found


def packed(dispatched: Dispatch, *, seed: int = 0) -> BatchChoice:
    """Return a dispatch with the packings of its pipelines, those that could be last packed with care."""
    return BatchChoice(dispatched, packings(schemes_with_lengths(dispatched), seed=seed))


_PACKED_SEQUENCES = 10_000  # so many sequences are packed to try changes


_DRAWS = 2000  # so many changes are drawn: many are refused before they need packing


def refine(dispatched: Dispatch, *, seed: int = 0) -> Dispatch:
    """Return a dispatch whose pipelines are done sooner when packed quickly, or the same one."""
    groups = [[dispatched.batch.lengths[i] for i in group] for group in dispatched.pipelines]
    refining = _Refining(dispatched.strategy.pipelines, groups, seed)
    refining.run()
    return of_lengths(dispatched.strategy, dispatched.batch, refining.groups, dispatched.bound_seconds)


@dataclass(frozen=True, slots=True)
class _Change:
    """New falling lengths of two pipelines."""

    pipelines: tuple[int, int]
    lengths: tuple[list[int], list[int]]


class _Refining:
    """The falling lengths of each pipeline, and its seconds when packed quickly."""

    def __init__(self, schemes: Sequence[Scheme], groups: Sequence[Sequence[int]], seed: int) -> None:
        self._schemes, self._random = schemes, random.Random(seed)
        self.groups = [sorted(group, reverse=True) for group in groups]
        self._seconds = [self._packed(i, group) for i, group in enumerate(self.groups)]

    def run(self) -> None:
        """Try changes of the last pipeline."""
        packed = 0
        for _ in range(_DRAWS if len(self.groups) > 1 else 0):
            last = max(range(len(self.groups)), key=self._seconds.__getitem__)
            change = self._draw(last)
            if change is not None and self._is_possible(change, self._seconds[last]):
                self._apply(change, self._seconds[last])
                packed += sum(map(len, change.lengths))
            if packed > _PACKED_SEQUENCES:
                return

    def _draw(self, last: int) -> _Change | None:
        """Return a move or an exchange with another pipeline; None when it changes nothing or cannot be."""
        other = self._random.randrange(len(self.groups))
        given = self._random.choice(self.groups[last])
        taken = self._random.choice([0, *self.groups[other]])  # 0: nothing
        holds = self._schemes[last].max_length, self._schemes[other].max_length
        if other == last or given == taken or taken > holds[0] or given > holds[1]:
            return None
        after = _changed(self.groups[last], given, taken), _changed(self.groups[other], taken, given)
        return _Change((last, other), after)

    def _is_possible(self, change: _Change, below: float) -> bool:
        """Tell whether both pipelines may get done before `below`, however they are packed."""
        pairs = zip(change.pipelines, change.lengths, strict=True)
        return all(unpacked_seconds(self._schemes[index], lengths) < below for index, lengths in pairs)

    def _apply(self, change: _Change, below: float) -> None:
        """Make the change if both pipelines get done before `below`."""
        seconds = []
        for index, lengths in zip(change.pipelines, change.lengths, strict=True):
            seconds.append(self._packed(index, lengths))
            if seconds[-1] >= below:
                return
        for index, lengths, after in zip(change.pipelines, change.lengths, seconds, strict=True):
            self.groups[index], self._seconds[index] = lengths, after

    def _packed(self, index: int, lengths: Sequence[int]) -> float:
        return quick_rows(self._schemes[index], lengths).seconds


def _changed(lengths: Sequence[int], without: int, with_: int) -> list[int]:
    result = list(lengths)
    if without:
        result.remove(without)
    return sorted([*result, *([with_] if with_ else [])], reverse=True)
