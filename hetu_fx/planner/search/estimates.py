"""Pipelines that searches compare: priced stage by stage, with ratios and blocks by what their devices are.

Devices that are alike are a class. What a stage takes depends on the classes of its devices and on which of them share
a node, so that equal stages are priced once, by the functions of the cost model, in a cluster of their own devices.
Numbers are those of `predict` but for which device of a stage stands for it in gradient syncs; what a search chooses by
them is priced by `predict` at its end.

Blocks go to the stages of a pipeline so that they end together, within what their devices can hold; a stage recomputes
what it has to. Blocks that are all alike are dealt, those that differ cut (`search.allocate`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE, cheapest_ring_cost
from hetu_fx.planner.price.links import hand_over_line
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.search.allocate import RangeSeconds, cut, deal, least_passing, spread
from hetu_fx.planner.search.device_orders import Groups, alike_in
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.replica import Family, Replica, ReplicaRules, StageEstimate, StageRun, stage_estimate
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Stage

_FEWEST = 2  # blocks, of which one stands at neither end if there are more

_OTHER = 1.25
"""Blocks that are balanced for slower numbers of micro-batches, up to this factor, may be the best for faster ones."""

_ROUNDED = 1 - 1e-9  # so much of a bound is one however it is rounded

Blocks = tuple[int, ...]
"""How many blocks each stage of a pipeline has."""


def rules_of(problem: Problem, zero: int) -> ReplicaRules:
    """Return what holds for the replicas of a problem's plans."""
    options = problem.options
    rooms = [(alike, int(alike.memory_bytes * options.memory_fraction)) for alike in alike_in(problem.cluster)]
    memory = {device.rank: room for alike, room in rooms for device in alike.devices}
    return ReplicaRules(options.schedule, zero, options.micro_batches, memory, options.recompute)


Shape = Callable[[Sequence[Device]], Stage]
"""How devices share a stage."""


def even(devices: Sequence[Device]) -> Stage:
    """Return a tensor parallel stage of equal shards."""
    return Stage(ranks_of(devices))


def ranks_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the ranks of devices, in order."""
    return tuple(device.rank for device in devices)


@dataclass(frozen=True, slots=True)
class EndEstimate:
    """What a step takes besides its pipelines: gradients home, in so many pieces, parameters from there, the update."""

    gradients: float = 0.0
    gather: float = 0.0
    update: float = 0.0
    pieces: int = 1

    def seconds(self, hidden: float) -> float:
        """Return it where gradients travel for so long beside the last backward; a piece does so after it."""
        return self.gather + max(self.gradients / self.pieces, self.gradients - hidden) + self.update


NO_END = EndEstimate()


class Estimates:
    """What stages and pipelines take, and the blocks that let stages end together; each is worked out once."""

    def __init__(
        self,
        costs: ProgramCosts,
        cluster: Cluster,
        rules: ReplicaRules,
        shape: Shape = even,
    ) -> None:
        """Groups are stages as `shape` says."""
        self._costs, self._cluster, self._rules, self._shape = costs, cluster, rules, shape
        numbers: dict[Hashable, int] = {}
        self._class = {
            device.rank: numbers.setdefault((_but_for_place(device), rules.memory[device.rank]), len(numbers))
            for device in cluster.devices
        }
        self._node = {device.rank: cluster.node_of(device.rank) for device in cluster.devices}
        by_speed = sorted(cluster.devices, key=lambda device: (device.speed, -device.rank))
        self._fastest = {device.kind: device for device in by_speed}
        self._shapes: dict[Hashable, Stage] = {}
        self._stages: dict[Hashable, StageEstimate] = {}
        self._replicas: dict[Hashable, Replica] = {}
        self._families: dict[Hashable, Family | None] = {}
        self._hand_overs: dict[Hashable, Line] = {}
        self._bounds: dict[Hashable, tuple[tuple[float, int], ...]] = {}
        self._free: dict[Hashable, Blocks | None] = {}
        self._turn_seconds: dict[tuple[float, tuple[int, ...]], tuple[float, float, float]] = {}
        self._seconds: dict[Hashable, dict[tuple[int, int], float]] = {}
        self._rings: dict[Hashable, tuple[int, ...]] = {}
        self._kinds: dict[tuple[int, ...], Hashable] = {}
        self._nodes: dict[tuple[int, ...], frozenset[int]] = {}

    def family(self, groups: Groups, num_replicas: int, rows: int) -> Family | None:
        """Return the fastest pipeline of these stages for so many rows, equal ones as one object; None if none fits."""
        key = (self.key(groups), num_replicas, rows)
        if key not in self._families:
            self._families[key] = self._new_family(groups, num_replicas, rows)
        return self._families[key]

    def _new_family(self, groups: Groups, num_replicas: int, rows: int) -> Family | None:
        """Return the fastest of pipelines whose blocks are balanced for each number of micro-batches of their rows."""
        best, found = None, set[Blocks]()
        for bound, count in sorted(self.bounds(groups, rows)):
            if best is not None and bound > _OTHER * best.seconds(rows):
                break
            micro_rows = math.ceil(rows / count)
            blocks = self.blocks(groups, num_replicas, (micro_rows, count), micro_rows)
            if blocks is not None and blocks not in found:
                found.add(blocks)
                family = Family(self.replica(groups, blocks), num_replicas, self._rules)
                best = family if best is None else min(best, family, key=lambda one: one.seconds(rows))
        return best

    def least_seconds(self, groups: Groups, rows: int, *, hands_over: bool = True) -> float:
        """Return seconds that no pipeline of these stages is below for so many rows; they take little to work out."""
        return min(bound for bound, _ in self.bounds(groups, rows, hands_over=hands_over))

    def bounds(self, groups: Groups, rows: int, *, hands_over: bool = True) -> tuple[tuple[float, int], ...]:
        """Return such seconds for each number of micro-batches; 0 where blocks differ.

        They leave out memory.
        """
        key = self.key(groups), rows, hands_over
        if key not in self._bounds:
            self._bounds[key] = tuple(self._new_bounds(groups, rows, hands_over))
        return self._bounds[key]

    def _new_bounds(self, groups: Groups, rows: int, hands_over: bool) -> Iterator[tuple[float, int]]:
        whole, by_block, besides = self._costs.num_blocks, *self._block_lines(groups, hands_over)
        for count in sorted({min(one, rows) for one in self._rules.micro_batches}):
            micro_rows = math.ceil(rows / count)
            lines = [Line(one(micro_rows), each(micro_rows)) for one, each in zip(besides, by_block, strict=True)]
            yield (least_passing(whole, lines, count - 1) * _ROUNDED if lines else 0.0), count

    def _block_lines(self, groups: Groups, hands_over: bool) -> tuple[list[Line], list[Line]]:
        """Return what stages take for each block, and besides blocks; nothing where blocks differ."""
        count = self._costs.num_blocks
        if not self._costs.is_uniform or count <= _FEWEST:
            return [], []
        lines = [self.stage(group, 1, 2).seconds for group in groups]
        besides = self._messages(groups, range(1, len(groups))) if hands_over else [Line()] * len(groups)
        for place, start in ((0, 0), (-1, count - 1)):
            with_end = self.stage(groups[place], start, start + 1).seconds
            end = Line(with_end.fixed - lines[place].fixed, with_end.slope - lines[place].slope)
            besides[place] = besides[place] + end
        return lines, besides

    def _messages(self, groups: Groups, stops: Sequence[int]) -> list[Line]:
        """Return what each stage hands over, to the next one and back; stages but the last end at these blocks."""
        edges = [self._hand_over(*pair, stop) for pair, stop in zip(itertools.pairwise(groups), stops, strict=True)]
        return list(map(Line.__add__, [*edges, Line()], [Line(), *edges]))

    def blocks(self, groups: Groups, num_replicas: int, rows: tuple[int, int], timed_rows: int) -> Blocks | None:
        """Return the blocks that let stages end together, timed for so many rows; None when no cut fits memory.

        `rows` are those of a micro-batch, and how many of these.
        """
        runs = [StageRun.of(stage, len(groups), rows, num_replicas, self._rules) for stage in range(len(groups))]
        free = self._free_blocks(groups, timed_rows)
        if free is not None and self._keep_all(groups, free, runs):
            return free
        pairs = zip(groups, runs, strict=True)
        known = [self._seconds.setdefault((self._kind(group), run, timed_rows), {}) for group, run in pairs]

        def seconds(index: int, start: int, stop: int) -> float:
            if (start, stop) not in known[index]:
                stage = self.stage(groups[index], start, stop)
                known[index][start, stop] = stage.seconds_of(runs[index], self._rules, timed_rows)
            return known[index][start, stop]

        return self.balanced(groups, seconds)

    def _free_blocks(self, groups: Groups, rows: int) -> Blocks | None:
        """Return the blocks that let stages end together if memory is left out; None where blocks differ."""
        key = tuple(map(self._kind, groups)), rows
        if key not in self._free:
            self._free[key] = self._new_free_blocks(groups, rows)
        return self._free[key]

    def _new_free_blocks(self, groups: Groups, rows: int) -> Blocks | None:
        count = self._costs.num_blocks
        if not self._costs.is_uniform or not len(groups) < count:
            return None
        pairs = [((1, 2), (1, 3))] * len(groups)  # of one block and of two
        pairs[0], pairs[-1] = ((0, 1), (0, 2)), ((count - 1, count), (count - 2, count))
        if len(groups) == 1:
            return (count,)
        times = [[self.stage(group, *n).seconds(rows) for n in pair] for group, pair in zip(groups, pairs, strict=True)]
        lines = [Line(first - (second - first), second - first) for first, second in times]
        return deal(count, len(groups), lambda index, start, stop: lines[index](stop - start))

    def _keep_all(self, groups: Groups, blocks: Blocks, runs: Sequence[StageRun]) -> bool:
        """Tell whether stages of so many blocks fit memory with nothing recomputed."""
        stops = itertools.accumulate(blocks)
        found = (self.stage(group, stop - n, stop) for group, n, stop in zip(groups, blocks, stops, strict=True))
        return all(stage.keeps_all(run, self._rules) for stage, run in zip(found, runs, strict=True))

    def balanced(self, groups: Groups, seconds: RangeSeconds) -> Blocks | None:
        """Return the blocks that let stages end together; None when none take finite seconds."""
        ways = deal if self._costs.is_uniform or len(groups) == 1 else cut
        return ways(self._costs.num_blocks, len(groups), seconds)

    def stage(self, devices: tuple[int, ...], start: int, stop: int) -> StageEstimate:
        """Return what a group takes for the blocks [start, stop)."""
        start, stop = self._like(start, stop)
        key = (self._kind(devices), start, stop)
        if key not in self._stages:
            stage, around = self._stage_of(devices), self._around(devices)
            self._stages[key] = stage_estimate(stage, start, stop, self._costs, around, self._rules.memory)
        return self._stages[key]

    def _stage_of(self, devices: tuple[int, ...]) -> Stage:
        kind = self._kind(devices)
        if kind not in self._shapes:
            self._shapes[kind] = self._shape([self._cluster.device(rank) for rank in devices])
        return replace(self._shapes[kind], devices=devices)

    def _sharing(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the places in a group of those that hold the same of all weights as its first device."""
        kind = self._kind(devices)
        if kind not in self._rings:
            self._rings[kind] = tuple(map(devices.index, self._stage_of(devices).context_groups[0]))
        return self._rings[kind]

    def replica(self, groups: Groups, blocks: Blocks) -> Replica:
        """Return a pipeline like that of these groups; one like it that was asked for before has other devices."""
        key = (self.key(groups), blocks)
        if key not in self._replicas:
            self._replicas[key] = self._new_replica(groups, blocks)
        return self._replicas[key]

    def key(self, groups: Groups) -> Hashable:
        """Return what pipelines have in common that take the same: what groups are, and which hand over to a node."""
        nodes = [self._node[group[0]] for group in groups]
        return tuple(map(self._kind, groups)), tuple([a != b for a, b in itertools.pairwise(nodes)])

    def ends(
        self,
        replicas: Iterable[Replica],
        firsts: Sequence[tuple[int, ...]],
        last: int,
        zero: int,
        shared_bytes: float = 0.0,
    ) -> EndEstimate:
        """Return what a step takes besides its pipelines, whose first stages are given.

        `last` is the last device of the first pipeline, which may stand on another node than all first ones;
        `shared_bytes` is what one turn of all parameters sends through the link of a node.
        """
        found = list(replicas)
        parameters = max(replica.parameter_bytes for replica in found)
        update = max(replica.update_seconds for replica in found)
        ring = tuple([devices[place] for devices in firsts for place in self._sharing(devices)])
        pieces = max(1, *(stage.blocks or 0 for replica in found for stage in replica.pipeline.stages))
        is_near = self._node[last] == self._node[ring[0]]
        rings = [ring] if is_near else [ring, (last, *ring[1:])]
        turns = [self._turns(parameters, one, zero, pieces) for one in rings]
        gradients, gather = (max(column) for column in zip(*turns, strict=True))
        turn = shared_bytes / self._cluster.inter.bytes_per_second
        sums = self._costs.row_sums.seconds([devices[0] for devices in firsts], self._cluster)
        return EndEstimate(
            gradients=max(gradients, turn if zero else 2 * turn),
            gather=max(gather, turn if zero else 0.0) + sums,
            update=update / len(ring) if zero else update,
            pieces=pieces,
        )

    def _turns(self, num_bytes: float, ring: tuple[int, ...], zero: int, pieces: int) -> tuple[float, float]:
        """Return (gradient sync, gather) seconds of so many pieces around a ring, a few of them at once."""
        key = num_bytes, ring
        if key not in self._turn_seconds:
            empty, full = (sync_seconds(size, ring, self._cluster, zero=1)[1] for size in (0.0, num_bytes))
            self._turn_seconds[key] = empty, full, cheapest_ring_cost(num_bytes, ring, self._cluster)
        empty, full, least = self._turn_seconds[key]
        turn = max((pieces * empty + full - empty) / min(pieces, BUCKETS_AT_ONCE), least)
        return (turn, turn) if zero else (2 * turn, 0.0)

    def shared_bytes(self, pipelines: Sequence[Groups], replica: Replica, *, are_all: bool = True) -> float:
        """Return the most bytes of parameters that one turn sends through the link of a node; 0 within one node.

        Every node gets all that its devices hold of what others hold too. `are_all`: there are no other pipelines.
        """
        node_of, stages = self._node, range(len(pipelines[0]))
        held = [{node_of[rank] for groups in pipelines for rank in groups[stage]} for stage in stages]
        blocks = [stage.blocks or 0 for stage in replica.pipeline.stages]
        stops = list(itertools.accumulate(blocks))
        total: dict[int, float] = {}
        for nodes, count, stop in zip(held, blocks, stops, strict=True):
            if len(nodes) > 1 or not are_all:
                size = self._costs.stage(stop - count, stop).parameter_bytes
                for node in nodes:
                    total[node] = total.get(node, 0.0) + size
        return max(total.values(), default=0.0)

    def least_turns(self, pipelines: Sequence[Groups]) -> tuple[float, float]:
        """Return for how long one turn of all parameters keeps the link of some node busy at least.

        Whatever the stages hold: alone, as far as none stands in one node only, and with other pipelines.
        """
        held = [frozenset[int]().union(*map(self._nodes_of, stage)) for stage in zip(*pipelines, strict=True)]
        least, size = min(map(len, held)), self._costs.between(0, self._costs.num_blocks).parameter_bytes
        beside = least / len(frozenset[int]().union(*held)) * size * _ROUNDED / self._cluster.inter.bytes_per_second
        return beside if least > 1 else 0.0, beside

    def _nodes_of(self, group: tuple[int, ...]) -> frozenset[int]:
        if group not in self._nodes:
            self._nodes[group] = frozenset(self._node[rank] for rank in group)
        return self._nodes[group]

    def crossing_seconds(self, pipelines: Sequence[Groups], replica: Replica) -> float:
        """Return for how long a row of each pipeline keeps the busiest link of a node busy with hand-overs."""
        stops = itertools.accumulate(stage.blocks or 0 for stage in replica.pipeline.stages)
        sizes = [self._costs.boundary(stop) for stop in stops]
        sent: dict[int, float] = {}
        for groups in pipelines:
            nodes = [self._node[group[0]] for group in groups]
            for (here, there), size in zip(itertools.pairwise(nodes), sizes, strict=False):
                for node in (here, there) if here != there else ():
                    sent[node] = sent.get(node, 0.0) + size
        return max(sent.values(), default=0.0) / self._cluster.inter.bytes_per_second

    def _kind(self, devices: tuple[int, ...]) -> Hashable:
        """Return what a group is: the classes of its devices, and which share a node."""
        if devices not in self._kinds:
            self._kinds[devices] = self._new_kind(devices)
        return self._kinds[devices]

    def _new_kind(self, devices: tuple[int, ...]) -> Hashable:
        nodes: dict[int, int] = {}
        places = [nodes.setdefault(self._node[rank], len(nodes)) for rank in devices]
        classes = tuple([self._class[rank] for rank in devices])
        return (classes, tuple(places)) if len(nodes) > 1 else classes

    def _like(self, start: int, stop: int) -> tuple[int, int]:
        """Return a range that costs the same, where all blocks are alike."""
        if start == 0 or stop == self._costs.num_blocks or not self._costs.is_uniform:
            return start, stop
        return 1, 1 + stop - start

    def _around(self, devices: Sequence[int]) -> Cluster:
        """Return a cluster of the devices and the fastest of their kinds, by which overheads are counted."""
        own = [self._cluster.device(rank) for rank in devices]
        fastest = {self._fastest[device.kind].rank: self._fastest[device.kind] for device in own}
        members = {device.rank: device for device in own} | fastest
        return replace(self._cluster, devices=tuple(members.values()))

    def _new_replica(self, groups: Groups, blocks: Blocks) -> Replica:
        stops = list(itertools.accumulate(blocks))
        triples = zip(groups, blocks, stops, strict=True)
        stages = [self.stage(devices, stop - count, stop) for devices, count, stop in triples]
        messages = self._messages(groups, stops[:-1])
        held = [replace(holding, stage=i) for i, stage in enumerate(stages) for holding in stage.holdings]
        pairs = zip(groups, blocks, strict=True)
        return Replica(
            pipeline=Pipeline(tuple(replace(self._stage_of(group), blocks=count) for group, count in pairs)),
            lines=tuple(stage.seconds + sent for stage, sent in zip(stages, messages, strict=True)),
            holdings=tuple(held),
            update_seconds=max(stage.update_seconds for stage in stages),
            host_seconds=max(stage.host_seconds for stage in stages),
            recompute_lines=tuple(stage.recompute_line for stage in stages),
            stage_bytes=tuple(max(one.piece.parameter_bytes for one in stage.holdings) for stage in stages),
        )

    def _hand_over(self, group: tuple[int, ...], other: tuple[int, ...], block: int) -> Line:
        size = self._costs.boundary(block)
        key = (self._kind((*group, *other)), len(group), size)
        if key not in self._hand_overs:
            stages = Stage(group), Stage(other)
            self._hand_overs[key] = hand_over_line(*stages, size, self._cluster)
        return self._hand_overs[key]


@once
def even_estimates(problem: Problem) -> Estimates:
    """Return the estimates of a problem's plans whose groups have equal shards, which all searches share."""
    return Estimates(problem.costs, problem.cluster, rules_of(problem, problem.options.zero))


def _but_for_place(device: Device) -> Device:
    """Return what prices know of a device besides its node; its memory is for the rules to say."""
    return replace(device, rank=0, node="0", source="given", memory_bytes=1)


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
        alike = self._estimates.key(groups)
        if alike not in self._replicas:
            cuts = dict.fromkeys(self._cuts(groups))
            self._replicas[alike] = tuple(self._estimates.replica(groups, blocks) for blocks in cuts)
        return tuple(found.on(groups) for found in self._replicas[alike])

    def _by_speed(self, devices: Sequence[Device]) -> Stage:
        """Return a stage whose shards finish together: units to speeds by exact min-max, 1 at least."""
        seconds = [lambda units, speed=device.speed: units / speed for device in devices]
        found = spread(self._costs.units if len(devices) > 1 else 1, seconds, low=(1,) * len(devices))
        assert found is not None, "no group is larger than there are units"
        return Stage(ranks_of(devices), found)

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
