"""Seconds of a pipeline's schedule.

Every stage runs the entries of its schedule in order: each when the stage is free and what it needs has come, the
forward of the stage before or the backward of the stage behind. What an entry hands over counts with it, as if nothing
overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from hetu_fx.planner.price.stage import StageCosts
from hetu_fx.plans.plan import Schedule, micro_batch_rows
from hetu_fx.plans.schedule import Phase, actions

Columns = tuple[tuple[float, ...], ...]
"""Seconds of each stage's micro-batches, by stage."""


def scheduled_seconds(stages: Sequence[StageCosts], rows: int, micro_batches: int, schedule: Schedule) -> float:
    """Return the seconds of `rows` rows in up to `micro_batches` micro-batches, larger ones first."""
    if rows == 0:
        return 0.0
    sizes = micro_batch_rows(rows, min(micro_batches, rows))
    forwards = tuple(_by_size(stage.forward_seconds, sizes) for stage in stages)
    backwards = tuple(_by_size(stage.backward_seconds, sizes) for stage in stages)
    return _played(forwards, backwards, schedule)


def _by_size(seconds: Callable[[int], float], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of micro-batches, those of one size worked out once."""
    known = {size: seconds(size) for size in dict.fromkeys(sizes)}
    return tuple([known[size] for size in sizes])


@lru_cache(maxsize=4096)
def _played(forwards: Columns, backwards: Columns, schedule: Schedule) -> float:
    """Return when the last stage has done its last entry."""
    board = _Board(forwards, backwards, schedule)
    while board.left:
        before = board.left
        for stage in range(len(forwards)):
            board.go_on(stage)
        assert board.left < before, "an order in which stages wait for each other"
    return max(board.free)


class _Board:
    """How far stages have come: when each is free, and when its entries are done."""

    def __init__(self, forwards: Columns, backwards: Columns, schedule: Schedule) -> None:
        count, self._last = len(forwards[0]), len(forwards) - 1
        self._seconds = [first + second for first, second in zip(forwards, backwards, strict=True)]
        self._orders = [_numbered(schedule, stage, len(forwards), count) for stage in range(len(forwards))]
        self._done: list[list[float | None]] = [[None] * (2 * count) for _ in forwards]
        self._places, self._count = [0] * len(forwards), count
        self.free, self.left = [0.0] * len(forwards), 2 * count * len(forwards)

    def go_on(self, stage: int) -> None:
        """Do the next entries of a stage, as long as what they need has come."""
        order, seconds, done = self._orders[stage], self._seconds[stage], self._done[stage]
        free, place = self.free[stage], self._places[stage]
        while place < len(order) and (came := self._came(stage, order[place])) is not None:
            free = max(free, came) + seconds[order[place]]
            done[order[place]] = free
            place += 1
        self.left -= place - self._places[stage]
        self.free[stage], self._places[stage] = free, place

    def _came(self, stage: int, entry: int) -> float | None:
        """Return when what an entry needs of another stage has come; None if it has not."""
        other = stage - 1 if entry < self._count else stage + 1
        return self._done[other][entry] if 0 <= other <= self._last else 0.0


@lru_cache(maxsize=512)
def _numbered(schedule: Schedule, stage: int, num_stages: int, count: int) -> tuple[int, ...]:
    """Return the entries of a stage in order, those of backwards counted behind all forwards."""
    found = actions(schedule, stage, num_stages, count)
    return tuple([one.micro_batch + (0 if one.phase is Phase.FORWARD else count) for one in found])
