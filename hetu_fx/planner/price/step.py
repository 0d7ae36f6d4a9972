"""Seconds of a step under a plan.

A stage takes l_s(x) seconds for forward and backward of a micro-batch of x rows, (1) to (3) of `price.stage`.

A pipeline of m micro-batches takes sum_s l_s(x) + (m - 1) max_s l_s(x)                                  (4)
A step takes the slowest pipeline, then its end (`price.step_end`);                                      (5)
replicas in which rows meet sum them in between.

Nothing is overlapped. Communication is priced by the same functions as the comm ops that run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import device_bytes, stops_of, tied_holders
from hetu_fx.planner.price.replica_groups import Columns
from hetu_fx.planner.price.stage import (
    Rounds,
    device_lines,
    forward_lines,
    hand_over_line,
    round_lines,
    rounds_of,
)
from hetu_fx.planner.price.step_end import end_seconds, sync_seconds, update_line
from hetu_fx.planner.values.device_memory import Terms
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.tied import Tied
from hetu_fx.plans.plan import Pipeline, Plan, Stage, pipeline_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction

TERMS = ("compute", "tensor_parallel", "hand_over", "idle", "gradient_sync", "gather", "optimizer")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A stage on its devices: seconds per micro-batch by term, and what it holds.

    `by_device` are the costs of its part of the program for each device, which differ in a grid alone; `rounds` is what
    the devices send each other; `again` is what `compute` has of forwards that are done once more in the backward, of
    each device.
    """

    stage: Stage
    by_device: tuple[PartCosts, ...]
    rounds: tuple[Rounds, ...]
    compute: tuple[Line, ...]
    sums: Line
    returns: Line
    to_next: Line
    to_previous: Line
    again: tuple[Line, ...]

    @property
    def parts(self) -> PartCosts:
        """Return the costs of its part of the program, for the first device."""
        return self.by_device[0]

    @property
    def slowest_compute(self) -> Line:
        """Return a line that no device's compute is above."""
        return reduce(Line.upper, self.compute)

    @property
    def tensor_parallel(self) -> Line:
        """Return (2): the sums of the forward and those of the backward."""
        return self.sums + self.returns

    @property
    def hand_over(self) -> Line:
        """Return (3): both messages of a micro-batch."""
        return self.to_next + self.to_previous

    @property
    def seconds(self) -> Line:
        """Return l_s, forward and backward of one micro-batch."""
        return self.slowest_compute + self.tensor_parallel + self.hand_over

    def share(self, index: int) -> float:
        """Return the share of the stage's index-th device in what its costs cut."""
        return self.stage.work_shares[index]

    def parameter_bytes(self, index: int) -> float:
        """Return the parameter bytes that the stage's index-th device holds."""
        return self.by_device[index].parameter_bytes_at(self.share(index))


def pipeline_seconds(lines: Sequence[Line], rows: int, micro_batches: int) -> float:
    """Return (4) for `rows` rows in up to `micro_batches` micro-batches (no more than there are rows)."""
    if rows == 0:
        return 0.0
    count = min(micro_batches, rows)
    times = [line(math.ceil(rows / count)) for line in lines]
    return math.fsum(times) + (count - 1) * max(times)


def stage_costs(pipeline: Pipeline, costs: ProgramCosts, cluster: Cluster) -> tuple[StageCosts, ...]:
    """Return the costs of every stage of a pipeline whose blocks are written out."""
    stops = stops_of(pipeline, costs.num_blocks)
    return tuple(_stage_costs(pipeline, i, stops, costs, cluster) for i in range(len(pipeline.stages)))


def _stage_costs(
    pipeline: Pipeline, index: int, stops: Sequence[int], costs: ProgramCosts, cluster: Cluster
) -> StageCosts:
    stage = pipeline.stages[index]
    positions = range(len(stage.devices))
    parts = tuple(costs.on(stage, i).stage(stops[index], stops[index + 1]) for i in positions)
    repeated = [costs.again(stage, stops[index], i) for i in positions]
    again = forward_lines(device_lines(stage, repeated, cluster))
    compute = tuple(map(add, device_lines(stage, parts, cluster), again))
    to_next = to_previous = Line()
    if index + 1 < len(pipeline.stages):
        size = costs.boundary(stops[index + 1])
        to_next = hand_over_line(stage, pipeline.stages[index + 1], size, cluster)
    if index > 0:
        to_previous = hand_over_line(stage, pipeline.stages[index - 1], costs.boundary(stops[index]), cluster)
    rounds = tuple(rounds_of(stage, costs.stage(stops[index], stops[index + 1]), parts))
    sums, returns = round_lines(rounds, cluster)
    return StageCosts(stage, parts, rounds, compute, sums, returns, to_next, to_previous, again)


Sync = Callable[[float, tuple[int, ...]], tuple[float, float]]
"""(gradient sync, gather) seconds of so many bytes over the ranks that hold them."""


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
    def micro_rows(self) -> int:
        """Return the rows of the largest micro-batch."""
        return math.ceil(self.rows / self.micro_batches)

    @property
    def parameter_bytes(self) -> float:
        """Return the parameter bytes that the device holds."""
        return self.costs.parameter_bytes(self.position)

    def num_copies(self, plan: Plan) -> int:
        """Return how many devices hold the device's parameters, near enough where replicas differ."""
        return len(plan.pipelines) * self.costs.stage.context

    def end_terms(self, plan: Plan, cluster: Cluster, sync: Sync) -> tuple[float, float, float]:
        """Return (gradient sync, gather, optimizer) seconds, with the devices that hold the same; `sync` prices a ring.

        Those of each other pipeline are `peers`, those of each other stage stand with what is `tied`.
        """
        ends = [sync(self.parameter_bytes, (*self.costs.stage.beside(self.rank), *self.peers))]
        ends += [sync(one.at(self.share), (self.rank, *others)) for one, others in self.tied]
        synced, gather = (math.fsum(column) for column in zip(*ends, strict=True))
        return synced, gather, self.update_seconds(plan, cluster)

    def update_seconds(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds of the update of what the device owns, and of what a step takes besides."""
        update = update_line(self.parameter_bytes, cluster.device(self.rank))
        return update(1 / self.num_copies(plan) if plan.zero else 1.0)


def predict(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Prediction:
    """Return the predicted step of a plan: (5), and every device's seconds and bytes by term.

    `why` names the device with the least idle time, which bounds the step, and its largest term. Raises
    `PlanError` for a plan that does not fit the program.
    """
    places = list(places_of(plan, costs, cluster))
    rows = pipeline_rows(costs.rows, plan)
    slowest = 0.0
    for pipeline, count in zip(plan.pipelines, rows, strict=True):
        lines = [stage.seconds for stage in stage_costs(pipeline, costs.under(plan), cluster)]
        slowest = max(slowest, pipeline_seconds(lines, count, pipeline.micro_batches))
    ends = ends_of(plan, places, cluster)
    end = end_seconds(ends) + row_sum_seconds(plan, costs, cluster)
    held = device_bytes(plan, costs, {rank: cluster.device(rank).speed for rank in plan.devices})
    pairs = zip(places, ends, strict=True)
    devices = tuple(_device_cost(place, held[place.rank], terms, slowest + end) for place, terms in pairs)
    return Prediction(slowest + end, devices, why=_why(devices, slowest + end))


def ends_of(plan: Plan, places: Iterable[PricedDevice], cluster: Cluster) -> list[tuple[float, float, float]]:
    """Return (gradient sync, gather, optimizer) seconds of each device."""
    sync = cache(lambda size, ranks: sync_seconds(size, ranks, cluster, plan.zero))
    return [place.end_terms(plan, cluster, sync) for place in places]


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
    rows, count = place.micro_rows, place.micro_batches if place.rows else 0
    costs = place.costs
    lines = (costs.compute[place.position], costs.tensor_parallel, costs.hand_over)
    work = [count * line(rows) for line in lines]
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
