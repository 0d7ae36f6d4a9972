"""Plans whose groups are contiguous in some order of the devices, by deadlines.

With stage seconds l_s(x) = a_s + b_s x, m micro-batches of x rows are done by T when for every stage s

    sum_r l_r(x) + (m - 1) l_s(x) <= T                                                          (1)

Each s bounds x from above, as memory does, so the most rows by T is m times the least bound: no search is
needed. When not even x = 1 is done, fewer micro-batches of one row are:

    k <= 1 + (T - sum_r l_r(1)) / max_s l_s(1)                                                  (2)

All replicas of a search are worked out at once, element by element, so that every machine gets the same
numbers. For an order of the devices and a number of replicas q, the most rows that can be done by a deadline T is

    W_q(i, T) = max( W_q(i - 1, T), max_k W_{q-1}(i - k, T) + rows(segment of k devices that ends at i, T) )    (3)

over the first i devices (one may be left out), with rows() the best of the segment's replicas. When W_q(n,
T) is at least the batch, a plan at most as slow as T exists; it is priced, T lowered to just below its
price, and so on until no plan is faster. Gradient sync, gather and optimizer are taken off T per replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.search.allocate import spread, spread_by_speed
from hetu_fx.planner.search.device_orders import Groups, Space, alone, orders
from hetu_fx.planner.search.estimates import Blocks, Estimates, device_ranks, replica_rules
from hetu_fx.planner.search.manners import (
    SequenceMode,
    attentions,
    group_by_speed,
    shared_between_products,
    shared_throughout,
)
from hetu_fx.planner.search.problem import Candidates, Problem, Search, in_all_splits
from hetu_fx.planner.search.replica import Family, Replica
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Attention, Pipeline, Plan, Stage

MOST_DEVICES = 16
"""Runs of more devices are too many to go through."""

MOST_SHARING = 16
"""Of the plans found, so many of the fastest with groups are also priced with the sequence shared."""

FINEST_SHARE = 64
"""Shares of a sequence are whole numbers of so many parts."""


_FASTER = 1e-4  # a plan counts as faster when it is by this share
_STEP = 0.02  # how far the deadline is lowered when the plan found for it did not meet it
_RUNNER_UP_SLACK = 1.25  # plans up to so much slower than the best are worth naming as runner-up
_DEADLINE_GROWTH = 1.5
_MAX_GROWTHS = 80


Segment = tuple[int, int]
"""Positions [start, stop) in an order of devices."""

Numbers = NDArray[np.float64]

_EPSILON = 1e-9  # a bound that is a whole number up to rounding counts as that number


class Builder:
    """Makes replicas of groups of which no two need be alike, nor the devices of one; remembers them."""

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
        units = self._costs.units if len(devices) > 1 else 1
        found = spread_by_speed(units, [device.speed for device in devices])
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


@dataclass(frozen=True, slots=True)
class Option:
    """A replica run in so many micro-batches of at most so many rows; what follows it takes `end_seconds`."""

    segment: Segment
    replica: Replica
    micro_batches: int
    most_micro_rows: int
    end_seconds: float


class DeadlineTable:
    """The options of all segments, and the rows that each does by a deadline."""

    def __init__(self, options: Sequence[Option], total: int) -> None:
        """No option does more than `total` rows. Options of a segment must stand together."""
        self.options, self._total = tuple(options), total
        width = max((len(option.replica.lines) for option in options), default=1)
        a, b = (self._padded(width, name) for name in ("fixed", "slope"))
        self._count = np.array([float(option.micro_batches) for option in options])
        self._most = np.array([float(min(option.most_micro_rows, total)) for option in options])
        self._end = np.array([option.end_seconds for option in options])
        self._sum_a = np.array([sum(line.fixed for line in o.replica.lines) for o in options])
        self._sum_b = np.array([sum(line.slope for line in o.replica.lines) for o in options])
        extra = self._count[:, None] - 1
        self._constant = self._sum_a[:, None] + extra * a
        self._slope = self._sum_b[:, None] + extra * b
        self._longest = (a + b).max(axis=1, initial=0.0)

    def _padded(self, width: int, name: str) -> Numbers:
        rows = [[getattr(line, name) for line in option.replica.lines] for option in self.options]
        return np.array([row + [0.0] * (width - len(row)) for row in rows]).reshape(len(rows), width)

    def most_rows(self, deadline: float) -> Numbers:
        """Return the most rows that each option does by the deadline, by (1), (2) and memory."""
        left = deadline - self._end
        bounds = _ratio(left[:, None] - self._constant, self._slope, self._total)
        bound = bounds.min(axis=1, initial=float(self._total))
        micro_rows = np.minimum(np.floor(bound + _EPSILON), self._most)
        single = 1 + np.floor(_ratio(left - self._sum_a - self._sum_b, self._longest, self._total) + _EPSILON)
        few = np.where(self._most >= 1, np.minimum(np.maximum(single, 0), self._count), 0)
        rows: Numbers = np.minimum(np.where(micro_rows >= 1, self._count * micro_rows, few), self._total)
        return rows

    def best(self, deadline: float) -> Mapping[Segment, tuple[int, int]]:
        """Return (rows, index of the option) of the best option of each segment that does any row."""
        result: dict[Segment, tuple[int, int]] = {}
        for index, rows in enumerate(self.most_rows(deadline).tolist()):
            segment = self.options[index].segment
            if rows > result.get(segment, (0, 0))[0]:
                result[segment] = (int(rows), index)
        return result


def _ratio(left: Numbers, slope: Numbers, most: int) -> Numbers:
    """Return left / slope; where nothing is needed (slope 0), `most` if time is left, else -1."""
    free = np.where(left >= 0, float(most), -1.0)
    return np.divide(left, slope, out=free, where=slope > 0)


def _search(problem: Problem) -> dict[Plan, float]:
    """Return the plans found, each with its predicted seconds; empty when none fits memory.

    Besides the whole cluster, each node alone is searched: on all of it every gradient sync is priced on the
    slowest link, which would hide the plans that leave a slow link unused.
    """
    plans: dict[Plan, float] = {}
    for part in (problem.cluster, *alone(problem.cluster)):
        state = _DeadlineSearch(replace(problem, cluster=part), plans)
        for order in orders(part):
            replicas = _segments(order, state.space, state.builder)
            for count in replica_counts(min(len(order), problem.costs.rows)):
                if problem.time_limit.ends(plans):
                    return plans
                problem.tell(f"{len(plans)} plans of consecutive devices; now {count} replicas over {list(order)}")
                state.descend(len(order), replicas, count)
    return plans


class _DeadlineSearch:
    """The plans found so far, and what does not change during a search."""

    def __init__(self, problem: Problem, plans: dict[Plan, float]) -> None:
        self._problem, self._costs, self._cluster = problem, problem.costs, problem.cluster
        options, devices = problem.options, problem.cluster.devices
        memory = {d.rank: d.usable_bytes(options.memory_fraction) for d in devices}
        self._rules = replace(replica_rules(problem, options.zero), memory=memory)
        self.space = Space.of(problem.costs, problem.cluster, options)
        micro_rows = max(1, round(problem.costs.rows / len(devices)))
        self.builder = Builder(problem.costs, problem.cluster, self._rules, micro_rows)
        self.plans = plans
        self._ways: dict[tuple[int, int], tuple[tuple[int, int, Replica], ...]] = {}

    def descend(self, num_devices: int, replicas: Mapping[Segment, list[Replica]], num_replicas: int) -> None:
        """Lower the deadline until no plan of so many replicas meets it."""
        table = DeadlineTable(list(self._options_of(replicas, num_replicas)), self._costs.rows)
        deadline = self._first_deadline(table, num_devices, num_replicas)
        while deadline is not None and not self._problem.time_limit.ends(self.plans):
            best = table.best(deadline)
            segments = best_segments(_rows_of(best), num_devices, num_replicas, self._costs.rows)
            if segments is None:
                return
            chosen = [table.options[best[segment][1]].replica for segment in segments]
            as_chosen = replace(self._rules, recompute=False)
            seconds = self._price([Family(one, num_replicas, as_chosen) for one in chosen])
            # a plan may cost more than the deadline that it was found for: its ends are the slowest replica's
            deadline = seconds * (1 - _FASTER) if seconds <= deadline else deadline * (1 - _STEP)

    def _options_of(self, replicas: Mapping[Segment, list[Replica]], num_replicas: int) -> Iterator[Option]:
        sync = self._sync_line(num_replicas)
        owned = 1 / num_replicas if self._rules.zero else 1.0
        for segment, found in replicas.items():
            for one in found:
                end = sync[0] + sync[1] * one.parameter_bytes + one.update_seconds * owned + one.host_seconds
                for count, most, made in self._ways_of(one, num_replicas):
                    yield Option(segment, replace(made, pipeline=one.pipeline), count, most, end)

    def _ways_of(self, replica: Replica, num_replicas: int) -> tuple[tuple[int, int, Replica], ...]:
        """Return the ways in which a replica fits memory, worked out once for all that hold the same."""
        key = (id(replica.stages), num_replicas)  # the builder keeps them, one object for all that are alike
        if key not in self._ways:
            limits = Family(replica, num_replicas, self._rules).limits
            self._ways[key] = tuple(way for limit in limits for way in self._lighter(replica, num_replicas, *limit))
        return self._ways[key]

    def _lighter(
        self, replica: Replica, num_replicas: int, count: int, most: int
    ) -> Iterator[tuple[int, int, Replica]]:
        """Yield a replica, then with more and more recomputed: each does twice the rows of the one before."""
        if most:
            yield count, most, replica
        fair = math.ceil(self._costs.rows / (num_replicas * count))
        while self._rules.recompute and most < 2 * fair:
            counts = replica.least_recompute(max(1, min(2 * most, 2 * fair)), count, num_replicas, self._rules)
            if counts is None:
                return
            made = replica.recomputing(counts)
            most = made.most_micro_rows(count, num_replicas, self._rules)
            yield count, most, made

    def _sync_line(self, num_replicas: int) -> tuple[float, float]:
        """Return (seconds, seconds per byte) of gradient sync and gather, on the slowest link there is."""
        ranks, node = self._cluster.ranks, self._cluster.node_of
        far = [rank for rank in ranks if node(rank) != node(ranks[0])]
        ring = tuple(dict.fromkeys((ranks[0], *far, *ranks)))[:num_replicas]
        empty, full = (sum(sync_seconds(size, ring, self._cluster, self._rules.zero)) for size in (0.0, 1e6))
        return empty + self._costs.row_sums.seconds(ring, self._cluster), (full - empty) / 1e6

    def _first_deadline(self, table: DeadlineTable, num_devices: int, num_replicas: int) -> float | None:
        """Return a deadline to start from: a little above the best plan's, or one that some plan meets."""
        if self.plans:
            return min(self.plans.values()) * _RUNNER_UP_SLACK
        work = self._costs.whole.flops * self._costs.rows or 1.0
        deadline = work / sum(device.speed for device in self._cluster.devices)
        for _ in range(_MAX_GROWTHS if table.options else 0):
            rows = _rows_of(table.best(deadline))
            if best_segments(rows, num_devices, num_replicas, self._costs.rows) is not None:
                return deadline
            deadline *= _DEADLINE_GROWTH
        return None

    def _price(self, families: Sequence[Family]) -> float:
        """Return the seconds of these replicas with their best rows, and remember the plan."""
        costs = [family.seconds for family in families]
        rows = spread(self._costs.rows, costs, low=(1,) * len(families))
        if rows is None:
            return math.inf
        pipelines = [family.pipeline(count) for family, count in zip(families, rows, strict=True)]
        plan = self._problem.plan(sorted(pipelines, key=lambda pipeline: min(pipeline.devices)))
        found = self._problem.fit_memory(plan)
        if found is None:
            return math.inf
        self.plans |= [found]
        return found[1]


def _segments(order: Sequence[int], space: Space, builder: Builder) -> dict[Segment, list[Replica]]:
    """Return the replicas that can be built of each run of devices in the order."""
    result: dict[Segment, list[Replica]] = {}
    for start in range(len(order)):
        for stop in range(start + 1, len(order) + 1):
            found = (builder.build(groups) for groups in space.replicas(order[start:stop]))
            result[start, stop] = list(itertools.chain.from_iterable(found))
    return result


def replica_counts(most: int) -> Iterator[int]:
    """Yield the numbers of replicas to try: all up to 8, then doubling, then the most."""
    yield from range(1, min(most, 8) + 1)
    count = 16
    while count < most:
        yield count
        count *= 2
    if most > 8:
        yield most


def _rows_of(best: Mapping[Segment, tuple[int, int]]) -> dict[Segment, int]:
    return {segment: rows for segment, (rows, _) in best.items()}


def best_segments(rows: Mapping[Segment, int], num_devices: int, num_replicas: int, total: int) -> list[Segment] | None:
    """Return `num_replicas` disjoint segments, in order, that do `total` rows or more, by (3), or None."""
    best: list[list[tuple[int, list[Segment]]]] = [[(0, [])] for _ in range(num_devices + 1)]
    for stop in range(1, num_devices + 1):
        for count in range(1, num_replicas + 1):
            left_out = best[stop - 1][count : count + 1]
            ending = [
                (before[count - 1][0] + rows[start, stop], [*before[count - 1][1], (start, stop)])
                for start, before in enumerate(best[:stop])
                if len(before) >= count and (start, stop) in rows
            ]
            if not left_out and not ending:
                break
            best[stop].append(max(left_out + ending, key=lambda pair: pair[0]))
    found = best[num_devices][num_replicas : num_replicas + 1]
    return found[0][1] if found and found[0][0] >= total else None


def _find(problem: Problem) -> Candidates:
    """Return the plans found with their seconds; where groups may share the sequence, also as they do."""
    found = _search(problem)
    if shared_between_products(problem, found):
        found |= _sharing(found, problem) if found else _fitting(problem)
    if shared_throughout(problem, found):
        found |= dict(_in_context(problem))
    return found


def _in_context(problem: Problem) -> Iterator[tuple[Plan, float]]:
    """Yield the plans that fit of one pipeline of runs of devices that share the sequence in proportion to speed.

    Runs are stages: as many as there are blocks for, of groups of one size.
    """
    count, costs, options = len(problem.cluster.devices), problem.costs, problem.options
    sizes = [size for size in costs.group_sizes(count - 1) if count % size == 0]
    most_stages = max(1, costs.num_blocks) if options.pipelines else 1
    for order in orders(problem.cluster):
        devices = [problem.cluster.device(rank) for rank in order]
        for size, stages in itertools.product(sizes if options.tensor_parallel else [1], range(1, count + 1)):
            each = count // stages
            if stages <= most_stages and count % stages == 0 and each % size == 0 and each > size:
                yield from _shared_by_speed(devices, each, size, problem)


def _shared_by_speed(devices: Sequence[Device], each: int, size: int, problem: Problem) -> Iterator[tuple[Plan, float]]:
    """Yield the plans of stages of `each` devices, in groups of `size`, for each number of micro-batches."""
    costs = problem.costs
    runs = [devices[i : i + each] for i in range(0, len(devices), each)]
    parts = min(costs.sequence_units, FINEST_SHARE)
    stages = tuple(group_by_speed(run, size, parts) for run in runs)
    speeds = [math.fsum(device.speed for device in run) for run in runs]
    blocks = spread_by_speed(costs.num_blocks, speeds)
    if costs.num_blocks:
        if blocks is None:
            return
        stages = tuple(replace(stage, blocks=own) for stage, own in zip(stages, blocks, strict=True))
    for count in dict.fromkeys(min(count, costs.rows) for count in problem.options.micro_batches):
        plan = problem.plan([Pipeline(stages, micro_batches=count)])
        tried: tuple[Attention, ...] = (*attentions(size, each // size, problem), "ring")
        ways = (problem.fit_memory(SequenceMode(attention=attention).of(plan)) for attention in tried)
        yield from (found for found in ways if found is not None)


def _sharing(found: Mapping[Plan, float], problem: Problem) -> dict[Plan, float]:
    """Return the best of the plans found whose groups can share the sequence, sharing it."""
    grouped = sorted(filter(_has_groups, found), key=lambda plan: (found[plan], plan.summary()))
    plans = (replace(plan, sequence_parallel=True) for plan in grouped[:MOST_SHARING])
    return {plan: predict(plan, problem.costs, problem.cluster).seconds for plan in plans}


def _fitting(problem: Problem) -> dict[Plan, float]:
    """Return the plans that fit memory as their groups share the sequence."""
    found = _search(replace(problem, profile=replace(problem.profile, costs=problem.costs.in_sequence)))
    return {replace(plan, sequence_parallel=True): seconds for plan, seconds in found.items() if _has_groups(plan)}


def _has_groups(plan: Plan) -> bool:
    return any(len(stage.devices) > 1 for *_, stage in plan.stages)


def _lacks(problem: Problem) -> str:
    count = len(problem.cluster.devices)
    if count <= MOST_DEVICES:
        return ""
    return f"it tries all runs of up to {MOST_DEVICES} devices, but there are {count}\nhint: use 'auto' or 'classes'"


CONTIGUOUS = Search(
    name="contiguous",
    applies=f"up to {MOST_DEVICES} devices: groups and stages of any size, side by side in order of speed or node",
    lacks=_lacks,
    find=in_all_splits(_find),
)
