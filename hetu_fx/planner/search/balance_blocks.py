"""Blocks to the stages of a pipeline so that they end together, within what their devices can hold.

A stage recomputes what it has to. Blocks that are all alike are dealt, those that differ cut (`planner.allocate`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

from hetu_fx.planner.search.allocate import cut, deal
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.replica import Family, ReplicaRules, StageRun
from hetu_fx.planner.values.program import ProgramCosts

Blocks = tuple[int, ...]


class Balance:
    """Finds blocks for pipelines."""

    def __init__(self, estimates: Estimates, costs: ProgramCosts, rules: ReplicaRules) -> None:
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

        count, rows = len(groups), (micro_rows, micro_batches)
        runs = [StageRun.of(stage, count, rows, num_replicas, self._rules) for stage in range(count)]

        def seconds(index: int, start: int, stop: int) -> float:
            return self._estimates.stage(groups[index], start, stop).seconds_of(runs[index], self._rules, micro_rows)

        ways = deal if self._costs.is_uniform or count == 1 else cut
        return ways(self._costs.num_blocks, count, seconds)
