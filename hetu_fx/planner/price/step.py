"""Seconds of a step under a plan.

A step takes the slowest pipeline, (5) or (6) of `price.stage`, then its end (`price.step_end`);         (7)
replicas in which rows meet sum them in between.

Nothing is overlapped: what `planner.simulate` plays may hide some of it. Communication is priced by the same functions
as the comm ops that run. Rings that leave a node share its link at the end of a step (`price.shared_links`).

A plan that does not fit memory recomputes. A block that is recomputed keeps what enters it, and takes its forward once
more (Chen et al., Training Deep Nets with Sublinear Memory Cost, section 4). The more blocks a stage recomputes the
less it holds, so that the fewest that fit are found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import Resource
from hetu_fx.planner.price.placement import PlacedDevice, device_bytes, holders_of, places_in, stops_of, tied_holders
from hetu_fx.planner.price.shared_links import Pair, Sync, turn_loads, unlike_ends
from hetu_fx.planner.price.stage import (
    StageCosts,
    scheduled_seconds,
    stage_costs,
)
from hetu_fx.planner.price.step_end import end_seconds, sync_seconds, update_line
from hetu_fx.planner.values.device_memory import Terms
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.shared import Tied
from hetu_fx.plans.plan import Pipeline, Plan, Stage, pipeline_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction

TERMS = ("compute", "tensor_parallel", "hand_over", "idle", "gradient_sync", "gather", "optimizer")


@dataclass(frozen=True, slots=True)
class PricedDevice:
    """One device in a plan: its stage's costs, its position in the group, its pipeline's rows and time.

    `peers` are the ranks that hold the same in all pipelines, this one included; `tied` are the parameters that other
    stages read too, each with a device of every one of those.
    """

    rank: int
    costs: StageCosts
    position: int
    rows: int
    micro_batches: int
    peers: tuple[int, ...]
    tied: tuple[tuple[Tied, tuple[int, ...]], ...] = ()

    @property
    def share(self) -> float:
        """Return the device's share of what its stage cuts."""
        return self.costs.share(self.position)

    @property
    def parameter_bytes(self) -> float:
        """Return the parameter bytes that the device holds."""
        return self.costs.parameter_bytes(self.position)

    def num_copies(self, plan: Plan) -> int:
        """Return how many devices hold the device's parameters, near enough where replicas differ."""
        return len(plan.pipelines) * self.costs.stage.context

    def end_terms(self, plan: Plan, cluster: Cluster, sync: Sync, own: Pair | None) -> tuple[float, float, float]:
        """Return (gradient sync, gather, optimizer) seconds, with the devices that hold the same; `sync` prices a ring.

        Those of each other pipeline are `peers`, those of each other stage stand with what is `tied`. `own` is what all
        but the tied takes where that is known.
        """
        ends = [own or sync(self.parameter_bytes, (*self.costs.stage.beside(self.rank), *self.peers))]
        ends += [sync(one.at(self.share), (self.rank, *others)) for one, others in self.tied]
        synced, gather = (math.fsum(column) for column in zip(*ends, strict=True))
        return synced, gather, self.update_seconds(plan, cluster)

    def update_seconds(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds of the update of what the device owns, and of what a step takes besides."""
        update = update_line(self.parameter_bytes, cluster.device(self.rank))
        return update(1 / self.num_copies(plan) if plan.zero else 1.0)


def predict(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Prediction:
    """Return the predicted step of a plan: (7), and every device's seconds and bytes by term.

    `why` names the device with the least idle time, which bounds the step, and its largest term. Raises
    `PlanError` for a plan that does not fit the program.
    """
    places = list(places_of(plan, costs, cluster))
    rows = pipeline_rows(costs.rows, plan)
    slowest = 0.0
    for pipeline, count in zip(plan.pipelines, rows, strict=True):
        stages = stage_costs(pipeline, costs.under(plan), cluster)
        slowest = max(slowest, scheduled_seconds(stages, count, pipeline.micro_batches, plan.schedule))
    loads = turn_loads(plan, costs, cluster)
    alone = cache(lambda size, ranks: sync_seconds(size, ranks, cluster, plan.zero))
    unlike = unlike_ends(plan, costs, alone)
    most = max(loads.values(), default=0.0)
    unlike = {rank: _shared((0.0, 0.0), pair, most, plan.zero) for rank, pair in unlike.items()}
    ends = ends_of(plan, places, cluster, loads, unlike)
    end = end_seconds(ends) + row_sum_seconds(plan, costs, cluster)
    held = device_bytes(plan, costs, {rank: cluster.device(rank).speed for rank in plan.devices})
    pairs = zip(places, ends, strict=True)
    devices = tuple(_device_cost(place, held[place.rank], terms, slowest + end) for place, terms in pairs)
    return Prediction(slowest + end, devices, why=_why(devices, slowest + end))


def ends_of(
    plan: Plan,
    places: Iterable[PricedDevice],
    cluster: Cluster,
    loads: Mapping[Resource, float] | None = None,
    unlike: Mapping[int, Pair] | None = None,
) -> list[tuple[float, float, float]]:
    """Return (gradient sync, gather, optimizer) seconds of each device.

    Those that meet others across nodes wait for the links of their nodes too, which one turn of all parameters keeps
    busy for `loads` seconds. `unlike` is what devices of pipelines take that are cut in unlike ways.
    """
    wanted = loads or {}

    def sync(size: float, ranks: tuple[int, ...]) -> tuple[float, float]:
        nodes = {cluster.node_of(rank) for rank in ranks}
        ends = (("out of node", node) for node in nodes) if len(nodes) > 1 else ()
        shared = max((wanted.get(end, 0.0) for end in ends), default=0.0)
        alone = sync_seconds(size, ranks, cluster, plan.zero)
        return _shared(sync_seconds(0.0, ranks, cluster, plan.zero), alone, shared, plan.zero) if shared else alone

    known = cache(sync)
    return [place.end_terms(plan, cluster, known, (unlike or {}).get(place.rank)) for place in places]


def _shared(empty: Pair, alone: Pair, turn: float, zero: int) -> Pair:
    """Return (gradient sync, gather) seconds of those who have links of which all turns want so many seconds."""
    turns = (1, 1) if zero else (2, 0)
    first, second = (max(a, e + n * turn) for e, a, n in zip(empty, alone, turns, strict=True))
    return first, second


def row_sum_seconds(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return the seconds of the sums over rows in the middle of a step, among the first devices of all pipelines."""
    return costs.row_sums.seconds([pipeline.devices[0] for pipeline in plan.pipelines], cluster)


def places_of(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Iterator[PricedDevice]:
    """Yield every device of a plan."""
    columns, rows = Columns(plan, costs.num_blocks), pipeline_rows(costs.rows, plan)
    for number, pipeline in enumerate(plan.pipelines):
        stages = stage_costs(pipeline, costs.under(plan), cluster)
        count, stops = max(1, min(pipeline.micro_batches, rows[number])), columns.stops(number)
        for index, stage in enumerate(stages):
            holders = tied_holders(costs.under(plan).on(stage.stage), stops)
            tied = tuple((one, _others(pipeline, held, index)) for one, held in holders if index in held)
            for position, rank in enumerate(stage.stage.devices):
                peers = columns.of(number, index, position)
                yield PricedDevice(rank, stage, position, rows[number], count, peers, tied)


def _others(pipeline: Pipeline, held: Sequence[int], index: int) -> tuple[int, ...]:
    return tuple(pipeline.stages[stage].devices[0] for stage in held if stage != index)


def _device_cost(place: PricedDevice, held: Terms, ends: Sequence[float], step: float) -> DeviceCost:
    count = place.micro_batches if place.rows else 0
    costs = place.costs
    lines = (costs.compute[place.position], costs.tensor_parallel, costs.hand_over)
    work = [count * line.fixed + place.rows * line.slope for line in lines]
    idle = max(0.0, step - math.fsum((*work, *ends)))
    seconds = tuple(zip(TERMS, (*work, idle, *ends), strict=True))
    return DeviceCost(place.rank, seconds, held)


def _why(devices: Sequence[DeviceCost], step: float) -> str:
    busiest = min(devices, key=lambda device: (dict(device.seconds)["idle"], device.rank))
    term, seconds = max(busiest.seconds, key=lambda pair: pair[1])
    share = f" {100 * seconds / step:.0f} %" if step else ""
    return f"bound by device {busiest.rank}: {term.replace('_', ' ')}{share}"


def memory_problems(prediction: Prediction, cluster: Cluster, fraction: float = 1.0) -> tuple[str, ...]:
    """Return a line for each device that would need more than `fraction` of its memory."""
    limits = {device.rank: int(device.memory_bytes * fraction) for device in cluster.devices}
    return tuple(
        f"device {d.rank} needs {d.total_bytes / 1e6:.4g} MB of {limits[d.rank] / 1e6:.4g} MB"
        for d in prediction.devices
        if d.total_bytes > limits[d.rank]
    )


class Columns:
    """Groups that hold a block, and their devices that stand at the same height of them.

    Devices of a column share one tuple, so that what depends on the column alone can be worked out once for all.
    """

    def __init__(self, plan: Plan, num_blocks: int) -> None:
        """Raises `PlanError` where the plan does not fit so many blocks."""
        self._plan, self._num_blocks = plan, num_blocks
        known = {pipeline.blocks(num_blocks): pipeline for pipeline in plan.pipelines}
        stops = {blocks: stops_of(pipeline, num_blocks) for blocks, pipeline in known.items()}
        self._stops = [stops[pipeline.blocks(num_blocks)] for pipeline in plan.pipelines]

    def stops(self, pipeline: int) -> tuple[int, ...]:
        """Return where the blocks of each stage of a pipeline begin, and where the last one's end."""
        return self._stops[pipeline]

    def of(self, pipeline: int, stage: int, position: int) -> tuple[int, ...]:
        """Return the ranks that hold the first block of a stage, in the order of pipelines, with the device asked for.

        Where groups differ in size, a device meets those that stand at the same height of theirs.
        """
        devices = self._plan.pipelines[pipeline].stages[stage].devices
        found = self._column(self._stops[pipeline][stage], position, len(devices))
        return found if found[pipeline] == devices[position] else _with(found, pipeline, devices[position])

    @once
    def _column(self, block: int, position: int, size: int) -> tuple[int, ...]:
        return tuple([devices[position * len(devices) // size] for devices in self._holders(block)])

    @once
    def _holders(self, block: int) -> list[tuple[int, ...]]:
        """Return the group of each pipeline that holds a block."""
        return [stage.devices for stage in holders_of(block, self._plan, self._stops)]


def _with(column: Sequence[int], pipeline: int, rank: int) -> tuple[int, ...]:
    """Return the column of a stage without blocks: with its own device instead of that which has the next block."""
    return (*column[:pipeline], rank, *column[pipeline + 1 :])


def least_blocks(count: int, fits: Callable[[int], bool]) -> int | None:
    """Return the least number, 0 to `count`, of blocks recomputed that fits; None if not even all of them do."""
    if fits(0):
        return 0
    if not count or not fits(count):
        return None
    return bisect_left(range(1, count), True, key=fits) + 1


def fitted(plan: Plan, costs: ProgramCosts, cluster: Cluster, options: PlanOptions) -> tuple[Plan, Prediction] | None:
    """Return a plan with the least recompute that fits memory, and its prediction; None where nothing fits.

    Without `options.recompute` the plan is returned as it is, if it fits. Its blocks must be written out.
    """
    bare = _with_counts(plan, {}) if options.recompute else plan
    prediction = predict(bare, costs, cluster)
    if not memory_problems(prediction, cluster, options.memory_fraction):
        return bare, prediction
    counts = _least_counts(bare, costs, cluster, options.memory_fraction) if options.recompute else None
    if counts is None:
        return None
    found = _with_counts(bare, counts)
    return found, predict(found, costs, cluster)


def _least_counts(
    plan: Plan, costs: ProgramCosts, cluster: Cluster, fraction: float
) -> dict[tuple[int, int], int] | None:
    """Return how many blocks each (pipeline, stage) has to recompute; None where a device does not fit with all."""
    counts: dict[tuple[int, int], int] = {}
    for place in places_in(plan, costs, {device.rank: device.speed for device in cluster.devices}):
        limit = int(cluster.device(place.rank).memory_bytes * fraction)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        least = _least(place, stage, limit, costs.under(plan))
        if least is None:
            return None
        key = place.pipeline, place.stage
        counts[key] = max(counts.get(key, 0), least)
    return counts


def _least(place: PlacedDevice, stage: Stage, limit: int, costs: ProgramCosts) -> int | None:
    def fits(blocks: int) -> bool:
        own = costs.kept_by(replace(stage, recompute=blocks), place.piece.start)
        return sum(count for _, count in place.peak(replace(place.piece, costs=own))) <= limit

    return least_blocks(place.piece.stop - place.piece.start, fits)


def _with_counts(plan: Plan, counts: dict[tuple[int, int], int]) -> Plan:
    """Return the plan with so many blocks of each (pipeline, stage) recomputed, none where none are named."""
    if not counts and not any(stage.recompute for *_, stage in plan.stages):
        return plan
    pipelines = []
    for i, pipeline in enumerate(plan.pipelines):
        stages = [replace(stage, recompute=counts.get((i, j), 0)) for j, stage in enumerate(pipeline.stages)]
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))
