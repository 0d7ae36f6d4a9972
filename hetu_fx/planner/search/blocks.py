"""Blocks to the stages of a pipeline so that they end together, within what their devices can hold.

Where all blocks are alike, each goes to the stage that would then be done first, which is exact for the least maximum
of costs that do not fall; blocks that differ are cut by dynamic programming.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator

from hetu_fx.planner.allocate import cut
from hetu_fx.planner.memory import in_flight
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.planner.replica import Family, Rules
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.space import Groups

Blocks = tuple[int, ...]

_Seconds = Callable[[int, int, int], float]
"""Seconds of a stage for the blocks [start, stop); infinite where they do not fit."""


class Balance:
    """Finds blocks for pipelines."""

    def __init__(self, estimates: Estimates, costs: ProgramCosts, rules: Rules) -> None:
        self._estimates, self._costs, self._rules = estimates, costs, rules
        self._families: dict[Hashable, Family | None] = {}

    def family(self, groups: Groups, num_replicas: int, rows: int) -> Family | None:
        """Return the fastest pipeline of these stages for so many rows, equal ones as one object; None if none fits."""
        key = (self._estimates.key(groups), num_replicas, rows)
        if key not in self._families:
            replicas = (self._estimates.replica(groups, blocks) for blocks in self.choices(groups, num_replicas, rows))
            found = (Family.of(replica, num_replicas, self._rules) for replica in replicas)
            self._families[key] = min(found, key=lambda family: family.seconds(rows), default=None)
        return self._families[key]

    def choices(self, groups: Groups, num_replicas: int, rows: int) -> Iterator[Blocks]:
        """Yield the blocks of a pipeline's stages for each number of micro-batches of its rows, if they fit."""
        found: set[Blocks | None] = {None}
        for count in sorted({min(count, rows) for count in self._rules.micro_batches}):
            blocks = self.balanced(groups, num_replicas, count, math.ceil(rows / count))
            if blocks not in found:
                found.add(blocks)
                assert blocks is not None
                yield blocks

    def balanced(self, groups: Groups, num_replicas: int, micro_batches: int, micro_rows: int) -> Blocks | None:
        """Return the blocks that let stages end together; None when no cut fits memory."""

        def seconds(index: int, start: int, stop: int) -> float:
            stage = self._estimates.stage(groups[index], start, stop)
            kept = in_flight(self._rules.schedule, index, len(groups), micro_batches)
            most = stage.piece.most_rows(stage.memory, kept, micro_batches, self._rules.zero, num_replicas)
            return stage.seconds(micro_rows) if most >= micro_rows else math.inf

        count = self._costs.num_blocks
        if len(groups) == 1:
            return (count,) if seconds(0, 0, count) < math.inf else None
        if not self._costs.is_uniform:
            return cut(count, len(groups), seconds)
        return _dealt(count, len(groups), seconds)


def _dealt(total: int, num_stages: int, seconds: _Seconds) -> Blocks | None:
    """Deal equal blocks, one to each stage and then one by one; None if they do not fit."""

    def taking(index: int, count: int) -> float:
        start = 0 if index == 0 else total - count if index == num_stages - 1 else 1
        return seconds(index, start, start + count)

    if total < num_stages:
        return None
    counts = [1] * num_stages
    heap = [(taking(index, 2), -index) for index in range(num_stages)]
    heapq.heapify(heap)
    for _ in range(total - num_stages):
        _, place = heap[0]
        counts[-place] += 1
        heapq.heapreplace(heap, (taking(-place, counts[-place] + 1), place))
    fits = all(taking(index, count) < math.inf for index, count in enumerate(counts))
    return tuple(counts) if fits else None
