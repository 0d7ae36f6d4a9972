"""Seconds of a step under a plan.

A step gathers parameters (`price.ways`), has the sums over rows in its middle, takes the slowest pipeline
(`price.pipeline`), sums gradients (`price.ways`), and updates. Each takes what its slowest device takes.  (5)

Nothing is overlapped but what devices do beside each other: what `planner.simulate` plays may hide some of it.
Communication is priced by the same functions as the comm ops that run.

A plan that does not fit memory recomputes. A block that is recomputed keeps what enters it, and takes its forward once
more (Chen et al., Training Deep Nets with Sublinear Memory Cost, section 4). The more blocks a stage recomputes the
less it holds, so that the fewest that fit are found by bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.pipeline import scheduled_seconds
from hetu_fx.planner.price.placement import PlacedDevice, device_bytes, places_in
from hetu_fx.planner.price.stage import StageCosts, stage_costs
from hetu_fx.planner.price.step_end import update_line
from hetu_fx.planner.price.ways import Ends, Ways
from hetu_fx.planner.values.device_memory import Terms
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage, pipeline_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction

TERMS = ("compute", "tensor_parallel", "hand_over", "idle", "gradient_sync", "gather", "optimizer")


@dataclass(frozen=True, slots=True)
class PricedDevice:
    """One device in a plan: its stage's costs, its position in the group, its pipeline's rows and micro-batches."""

    rank: int
    costs: StageCosts
    position: int
    rows: int
    micro_batches: int

    def update_seconds(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds of the update of what the device owns, and of what a step takes besides.

        As many devices hold its parameters as there are pipelines, and contexts, near enough where these differ.
        """
        update = update_line(self.costs.parameter_bytes(self.position), cluster.device(self.rank))
        return update(1 / (len(plan.pipelines) * self.costs.stage.context) if plan.zero else 1.0)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step takes besides its pipelines: gradients home, parameters from there, and the updates."""

    gradients: Ends
    gather: Ends
    updates: Mapping[int, float]

    @classmethod
    def of(cls, plan: Plan, places: Iterable[PricedDevice], costs: ProgramCosts, cluster: Cluster) -> StepEnd:
        """Return that of a plan with all of its devices."""
        ways = Ways(plan, costs.under(plan), cluster)
        updates = {place.rank: place.update_seconds(plan, cluster) for place in places}
        return cls(ways.ends("gradients"), ways.ends("gather"), updates)

    @property
    def seconds(self) -> float:
        """Return what the slowest devices take, one term after the other."""
        return self.gradients.seconds + self.gather.seconds + max(self.updates.values())

    def of_device(self, rank: int) -> tuple[float, float, float]:
        """Return (gradient sync, gather, optimizer) seconds of a device."""
        return self.gradients.by_device.get(rank, 0.0), self.gather.by_device.get(rank, 0.0), self.updates[rank]


def predict(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Prediction:
    """Return the predicted step of a plan: (5), and every device's seconds and bytes by term.

    `why` names the device with the least idle time, which bounds the step, and its largest term. Raises
    `PlanError` for a plan that does not fit the program.
    """
    runs = list(_runs(plan, costs, cluster))
    slowest = max(scheduled_seconds(stages, rows, p.micro_batches, plan.schedule) for p, rows, stages in runs)
    places = [place for run in runs for place in _places(*run)]
    end = StepEnd.of(plan, places, costs, cluster)
    step = slowest + end.seconds + row_sum_seconds(plan, costs, cluster)
    held = device_bytes(plan, costs, {rank: cluster.device(rank).speed for rank in plan.devices})
    devices = tuple(_device_cost(place, held[place.rank], end.of_device(place.rank), step) for place in places)
    return Prediction(step, devices, why=_why(devices, step))


def row_sum_seconds(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return the seconds of the sums over rows in the middle of a step, among the first devices of all pipelines."""
    return costs.row_sums.seconds([pipeline.devices[0] for pipeline in plan.pipelines], cluster)


_Run = tuple[Pipeline, int, tuple[StageCosts, ...]]
"""A pipeline, its rows, and what its stages cost."""


def _runs(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Iterator[_Run]:
    for pipeline, rows in zip(plan.pipelines, pipeline_rows(costs.rows, plan), strict=True):
        largest = math.ceil(rows / max(1, min(pipeline.micro_batches, rows)))
        yield pipeline, rows, stage_costs(pipeline, costs.under(plan), cluster, max(1, largest))


def _places(pipeline: Pipeline, rows: int, stages: Sequence[StageCosts]) -> Iterator[PricedDevice]:
    """Yield every device of a pipeline."""
    count = max(1, min(pipeline.micro_batches, rows))
    for stage in stages:
        for position, rank in enumerate(stage.stage.devices):
            yield PricedDevice(rank, stage, position, rows, count)


def end_seconds_of(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return what a step takes besides its pipelines, whatever its rows are.

    Raises `PlanError` for a plan that does not fit the program.
    """
    places = (place for run in _runs(plan, costs, cluster) for place in _places(*run))
    return StepEnd.of(plan, places, costs, cluster).seconds


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
