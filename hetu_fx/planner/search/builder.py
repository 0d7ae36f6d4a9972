"""Replicas of groups of which no two need be alike, nor the devices of one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.estimates import Blocks, Estimates, device_ranks
from hetu_fx.planner.search.replica import Replica
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Stage


class Builder:
    """Makes such replicas; remembers them."""

    def __init__(self, costs: ProgramCosts, cluster: Cluster, rules: ReplicaRules, micro_rows: int) -> None:
        """Blocks are balanced for micro-batches of `micro_rows` rows."""
        self._costs, self._cluster, self._rules, self._rows = costs, cluster, rules, micro_rows
        self._estimates = Estimates(costs, cluster, rules, self._by_speed)
        self._replicas: dict[Hashable, tuple[Replica, ...]] = {}
        self._speed = math.fsum(device.speed for device in cluster.devices)

    def build(self, groups: Groups) -> tuple[Replica, ...]:
        """Return the replicas of these stages: one, or one for each cut of the blocks that memory asks for.

        None where there are too few blocks, or no memory.
        """
        alike = self._estimates.kinds.key(groups)
        if alike not in self._replicas:
            cuts = dict.fromkeys(self._cuts(groups))
            self._replicas[alike] = tuple(self._estimates.replica(groups, blocks) for blocks in cuts)
        return tuple(found.on(groups) for found in self._replicas[alike])

    def _by_speed(self, devices: Sequence[Device]) -> Stage:
        """Return a stage whose shards finish together: units to speeds by exact min-max, 1 at least."""
        seconds = [lambda units, speed=device.speed: units / speed for device in devices]
        found = spread(self._costs.units if len(devices) > 1 else 1, seconds, low=(1,) * len(devices))
        assert found is not None, "no group is larger than there are units"
        return Stage(device_ranks(devices), found)

    def _cuts(self, groups: Groups) -> Iterator[Blocks]:
        """Yield the blocks of stages that end together, within memory, for each number of micro-batches.

        Memory is that for the rows that the devices' share of the cluster's speed stands for; where these do not fit,
        for micro-batches of one row. What is in flight depends on where a stage stands.
        """
        find = self._estimates
        free = find.balanced(groups, lambda index, *blocks: find.stage(groups[index], *blocks).seconds(self._rows))
        if free is None:
            return
        rows = self._rows_of(groups)
        for count in dict.fromkeys(min(count, rows) for count in self._rules.micro_batches):
            tried = (self._fitting(groups, (each, count), free) for each in (math.ceil(rows / count), 1))
            yield from itertools.islice((blocks for blocks in tried if blocks is not None), 1)

    def _rows_of(self, groups: Groups) -> int:
        speed = math.fsum(self._cluster.device(rank).speed for devices in groups for rank in devices)
        return max(1, round(self._costs.rows * speed / self._speed))

    def _fitting(self, groups: Groups, rows: tuple[int, int], free: Blocks) -> Blocks | None:
        """Return blocks that fit memory for (rows of a micro-batch, micro-batches); `free` ones if these do."""
        copies = max(1, len(self._cluster.devices) // sum(map(len, groups)))
        most = self._estimates.replica(groups, free).most_micro_rows(rows[1], copies, self._rules)
        return free if most >= rows[0] else self._estimates.blocks(groups, copies, rows, self._rows)
