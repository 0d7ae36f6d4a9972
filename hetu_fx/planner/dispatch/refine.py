"""A dispatch refined with the packing in view.

Hydraulis' two stages are separate: a dispatch knows nothing of what its sequences cost when they are packed,
where rows are not all full, not all alike, and cost something each. Here the last pipeline, packed quickly,
gives sequences away or exchanges them, drawn by a seed, as long as it and the other one get done sooner.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.planner.dispatch.dispatch import Dispatch, of_lengths, unpacked_seconds
from hetu_fx.planner.dispatch.quick import quick_rows
from hetu_fx.planner.dispatch.strategy import Scheme

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
