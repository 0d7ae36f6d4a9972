"""Seconds of a step under a plan.

A step gathers parameters (`price.ways`), has the sums over rows in its middle, takes what a step takes on hosts and the
slowest pipeline (`price.pipeline`), sums gradients (`price.ways`), and updates. Each takes what its slowest device
takes.  (5)

Under zero 3 parameters are gathered twice, unit by unit, and nothing before the step.

Nothing is overlapped but what devices do beside each other, and sums beside products (`price.beside`): what
`planner.simulate` plays may hide some of it. Searches compare plans by what the step takes if gradients, and what
stages hand over, travel beside work on links of their own.
Communication is priced by the same functions as the comm ops that run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetu_fx.base.words import bytes_text, format_used_bytes
from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.price.alike import alike
from hetu_fx.planner.price.beside import overlap_sums
from hetu_fx.planner.price.link_load import Resource
from hetu_fx.planner.price.placement import device_bytes
from hetu_fx.planner.price.schedule_seconds import Finish, finish
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD, OP_SECONDS, WEIGHT_MOVES, StageCosts, stage_costs
from hetu_fx.planner.price.step_end import OPTIMIZER_MOVES, optimizer_seconds
from hetu_fx.planner.price.ways import Bucket, DirectionCosts, Stops, Ways, seconds_beside_units
from hetu_fx.planner.values.device_memory import Terms
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Plan, micro_batch_rows, pipeline_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.schedule import PHASES

TERMS = ("host", "compute", "tensor_parallel", "hand_over", "idle", "gradient_sync", "gather", "optimizer")


@dataclass(frozen=True, slots=True)
class PricedDevice:
    """One device in a plan: its stage's costs, its position in the group, its pipeline's rows and micro-batches."""

    rank: int
    costs: StageCosts
    position: int
    rows: int
    micro_batches: int

    @property
    def work(self) -> Iterator[float]:
        """Yield the seconds of its compute, of sums inside its stage, and of hand-overs."""
        count = self.micro_batches if self.rows else 0
        lines = self.costs.compute[self.position], self.costs.tensor_parallel, self.costs.hand_over
        return (count * line.fixed + self.rows * line.slope for line in lines)

    def update_seconds(self, plan: Plan, cluster: Cluster) -> float:
        """Return the seconds of the update of what the device owns.

        As many devices hold its parameters as there are pipelines, and contexts, near enough where these differ.
        """
        owned = 1 / (len(plan.pipelines) * self.costs.stage.context) if plan.zero else 1.0
        return optimizer_seconds(owned * self.costs.parameter_bytes(self.position), cluster.device(self.rank))


class PricedStep:
    """A step under a plan, priced: what it takes one thing after the other, and with what is sent on its way meanwhile.

    `like` is for each pipeline the first that is like it, `unlike` are these. Raises `PlanError` for a plan that does
    not fit the program.
    """

    def __init__(self, plan: Plan, costs: ProgramCosts, cluster: Cluster) -> None:
        self.plan, self._costs, self._cluster = plan, costs, cluster
        self.like = alike(plan, costs.rows, cluster)
        self._runs = list(_runs(plan, costs, cluster, self.like))
        self.unlike = {like: self._runs[like] for like in self.like}
        firsts = (places for run in self.unlike.values() for places in _places(*run))
        self._update = max(self._update_of(places) for places in firsts)

    def _finish(self, run: _Run, beside: Sequence[int] = ()) -> Finish:
        pipeline, rows, stages = run
        count, chunks = pipeline.micro_batches, pipeline.deal.chunks
        return finish(stages, rows, count, self.plan.schedule, chunks=chunks, beside=beside)

    def _overlapped(self) -> list[tuple[PartedPipeline, Finish]]:
        """Return how the pipelines that differ end if what stages hand over travels beside work."""
        edges = [_links_used(pipeline, self._cluster) for pipeline, *_ in self._runs]
        counts = Counter(link for own in edges for links in own for link in links)
        found: dict[tuple[int, tuple[int, ...]], tuple[PartedPipeline, Finish]] = {}
        for like, run, own in zip(self.like, self._runs, edges, strict=True):
            beside = tuple([max((counts[link] for link in links), default=1) for links in own])  # 1 within a node
            if (like, beside) not in found:
                found[like, beside] = run[0], self._finish(run, beside)
        return list(found.values())

    def _handed_seconds(self) -> float:
        """Return for how long the link of a node is busy with all hand-overs, a micro-batch going through."""
        busy: dict[Resource, float] = {}
        for pipeline, rows, _ in self._runs:
            for (part, other), block in zip(pairwise(pipeline.parts), pipeline.stops[1:], strict=False):
                for ends in ((part, other), (other, part)):
                    size = rows * self._costs.boundary(block)
                    _add_crossing(busy, ends[0].devices[0], ends[1].devices[0], size, self._cluster)
        return max(busy.values()) + max(map(_latency, self.unlike.values())) if busy else 0.0

    def _ways(self) -> Ways:
        return Ways(self.plan, self._costs.under(self.plan), self._cluster)

    @property
    def end_seconds(self) -> float:
        """Return what the step takes after its pipelines, and before them for a gather, whatever its rows are."""
        ways = self._ways()
        return ways.ends("gradients").seconds + ways.ends("gather").seconds + self._update

    @property
    def host_seconds(self) -> float:
        """Return what the step takes on the slowest of the hosts."""
        return max(max(stage.host) for _, _, stages in self.unlike.values() for stage in stages)

    @property
    def overlapped_seconds(self) -> float:
        """Return what the step takes if what is sent travels beside work: what searches compare by."""
        if self.plan.gathers_units:
            return self._seconds_by_units()
        ways, found = self._ways(), self._overlapped()
        done = max(self._handed_seconds(), *(finished.seconds for _, finished in found))
        home = ways.arrival_home(_readiness(found, ways.kinds))
        return ways.ends("gather").overlapped_seconds + self._row_sums + max(done, home) + self._update

    def _seconds_by_units(self) -> float:
        """Return what the step takes where each unit is gathered while the one before it is computed (zero 3)."""
        runs = [(rows, stage) for _, rows, (stage,) in self.unlike.values() if rows]
        forward, backward = (max(one.seconds_of(phase, rows) for rows, one in runs) for phase in PHASES["1f1b"])
        done = max(self._finish(run).seconds for run in self.unlike.values())
        return done + seconds_beside_units(self._ways().units(), forward, backward) + self._row_sums + self._update

    @property
    def _row_sums(self) -> float:
        return row_sum_seconds(self.plan, self._costs, self._cluster)

    def _held(self, pipelines: Container[int] | None = None) -> dict[int, Terms]:
        """Return the bytes of every device, or of those of some pipelines, by term."""
        speeds = {rank: self._cluster.device(rank).speed for rank in self.plan.devices}
        return device_bytes(self.plan, self._costs, speeds, pipelines)

    def fits(self, fraction: float) -> bool:
        """Tell whether every device has what it needs in so much of its memory."""
        asked = None if self.plan.homes else self.unlike  # whose homes may differ
        needed = ((rank, sum(count for _, count in held)) for rank, held in self._held(asked).items())
        return all(count <= self._cluster.device(rank).usable_bytes(fraction) for rank, count in needed)

    @property
    def prediction(self) -> Prediction:
        """Return the predicted step, and every device's seconds and bytes by term."""
        ways = self._ways()
        ends = [ways.ends("gradients"), ways.ends("gather")]
        slowest = max(self._finish(run).seconds for run in self.unlike.values())
        step = slowest + (sum(one.seconds for one in ends) + self._update) + self._row_sums
        by_device, held = [places for run in self._runs for places in _places(*run)], self._held()
        devices = tuple(_device_cost(own, held[own[0].rank], self._ends_of(own, ends), step) for own in by_device)
        told = (_repeated_text(place) for places in by_device for place in places)
        why = [_why(devices, step), *dict.fromkeys(filter(None, told))]
        return Prediction(step, devices, why="\n".join(why))

    def _ends_of(self, places: Places, ends: Sequence[DirectionCosts]) -> list[float]:
        """Return (gradient sync, gather, optimizer) seconds of a device."""
        return [*(one.by_device.get(places[0].rank, 0.0) for one in ends), self._update_of(places)]

    def _update_of(self, places: Places) -> float:
        """Return the seconds of the update of what a device owns."""
        return sum(place.update_seconds(self.plan, self._cluster) for place in places)


def _readiness(found: Iterable[tuple[PartedPipeline, Finish]], kinds: Sequence[Stops]) -> Callable[[Bucket], float]:
    """Return what tells when all pipelines have done the backward of a bucket's blocks."""
    unlike = dict.fromkeys((kinds.index(pipeline.stops), pipeline.stops, finished) for pipeline, finished in found)

    def ready(bucket: Bucket) -> float:
        parts = ((finished, bucket.holders[kind], stops) for kind, stops, finished in unlike)
        return max(
            finished.done(part, _made_from(bucket.start, *stops[part : part + 2])) for finished, part, stops in parts
        )

    return ready


def _made_from(block: int, start: int, stop: int) -> float:
    """Return the share of a part's blocks [start, stop) that stands from a block on."""
    return (stop - block) / (stop - start) if stop > start else 1.0


def predict(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Prediction:
    """Return the predicted step of a plan: (5), and every device's seconds and bytes by term.

    `why` names the device with the least idle time, which bounds the step, and its largest term. Raises
    `PlanError` for a plan that does not fit the program.
    """
    return PricedStep(plan, costs, cluster).prediction


def row_sum_seconds(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return the seconds of the sums over rows in the middle of a step, among the first devices of all pipelines."""
    return costs.row_sums.seconds([pipeline.devices[0] for pipeline in plan.pipelines], cluster)


_Run = tuple[PartedPipeline, int, tuple[StageCosts, ...]]
"""A pipeline, its rows, and what its parts cost, or those of one that is like it."""

Places = Sequence[PricedDevice]
"""A device, once for each chunk that it holds."""


def _runs(plan: Plan, costs: ProgramCosts, cluster: Cluster, like: Sequence[int]) -> Iterator[_Run]:
    """Yield all pipelines of a plan; what parts cost is worked out for the first of those that are alike."""
    known: dict[int, tuple[StageCosts, ...]] = {}
    for first, pipeline, rows in zip(like, plan.parts(costs.num_blocks), pipeline_rows(costs.rows, plan), strict=True):
        if first not in known:
            largest = max(1, micro_batch_rows(rows, pipeline.micro_batches)[0])
            found = stage_costs(pipeline, costs.under(plan).of_replica(rows), cluster, largest)
            known[first] = tuple(overlap_sums(one, largest, plan.schedule, cluster) for one in found)
        yield pipeline, rows, known[first]


def _latency(run: _Run) -> float:
    """Return the seconds of one micro-batch through all stages."""
    pipeline, rows, stages = run
    return sum(stage.seconds(rows // max(1, min(pipeline.micro_batches, rows))) for stage in stages)


def _places(pipeline: PartedPipeline, rows: int, parts: Sequence[StageCosts]) -> Iterable[Places]:
    """Return every device of a pipeline."""
    count = max(1, min(pipeline.micro_batches, rows))
    found: dict[int, list[PricedDevice]] = {}
    for part, costs in zip(pipeline.parts, parts, strict=True):
        for position, rank in enumerate(part.devices):
            found.setdefault(rank, []).append(PricedDevice(rank, costs, position, rows, count))
    return found.values()


def _device_cost(places: Places, held: Terms, ends: Sequence[float], step: float) -> DeviceCost:
    first = places[0]
    work = [first.costs.host[first.position], *map(math.fsum, zip(*(place.work for place in places), strict=True))]
    idle = max(0.0, step - math.fsum((*work, *ends)))
    seconds = tuple(zip(TERMS, (*work, idle, *ends), strict=True))
    return DeviceCost(first.rank, seconds, held)


def _why(devices: Sequence[DeviceCost], step: float) -> str:
    busiest = min(devices, key=lambda device: (dict(device.seconds)["idle"], device.rank))
    term, seconds = max(busiest.seconds, key=lambda pair: pair[1])
    share = f" {100 * seconds / step:.0f} %" if step else ""
    return f"bound by device {busiest.rank}: {term.replace('_', ' ')}{share}"


def _repeated_text(place: PricedDevice) -> str:
    """Return what is to be told of a group of more devices than what it splits has parts; empty for others."""
    size, parts = place.costs.parts.late_parameter_bytes, place.costs.repeated_parts
    if not size:
        return ""
    each = len(place.costs.repeating(place.position))
    return (
        f"groups of {parts * each} devices split what has {parts} parts (key-value heads, say): every {each} hold the "
        f"same part, {bytes_text(size)} of parameters whose gradients they sum"
    )


def memory_problems(prediction: Prediction, cluster: Cluster, fraction: float = 1.0) -> tuple[str, ...]:
    """Return a line for each device that would need more than `fraction` of its memory."""
    limits = {device.rank: device.usable_bytes(fraction) for device in cluster.devices}
    return tuple(
        f"device {d.rank} needs {format_used_bytes(d.total_bytes, limits[d.rank])}"
        for d in prediction.devices
        if d.total_bytes > limits[d.rank]
    )


def _links_used(pipeline: PartedPipeline, cluster: Cluster) -> list[tuple[tuple[int, int, str], ...]]:
    """Return the links of nodes that each edge between parts uses, by part; none within a node.

    Pipelines that hand over to the same part through one share it.
    """
    nodes = [cluster.node_of(stage.devices[0]) for stage in pipeline.parts]
    return [
        ((index, here, "out"), (index, there, "in")) if here != there else ()
        for index, (here, there) in enumerate(pairwise(nodes))
    ]


def _add_crossing(busy: dict[Resource, float], sender: int, receiver: int, num_bytes: float, cluster: Cluster) -> None:
    """Add for how long bytes that go from one node to another keep the links busy that these share."""
    for end in cluster.ends(sender, receiver):
        busy[end.key] = busy.get(end.key, 0.0) + num_bytes / end.bytes_per_second


def bound_seconds(costs: ProgramCosts, devices: Sequence[Device]) -> float:
    """Return seconds that no plan of a step can be faster than.

    The devices have the work of all R rows to do, at the speed of all of them together; each parameter is moved by one
    device at least, and updated by one. Memory, communication, waiting and what cannot be divided are left out:

        step >= (3 R (flops + traffic f) + 3 ops o + parameters (moves + update) f) / speed                   (6)

    f are the FLOPs in the time of a byte and o those in the time that running an op takes, of the device with least.
    """
    whole, top_speeds = costs.between(0, costs.num_blocks), dict[str, float]()
    for device in devices:
        top_speeds[device.kind] = max(device.speed, top_speeds.get(device.kind, 0.0))
    per_byte, per_op = min(device.flops_per_byte for device in devices), OP_SECONDS * min(top_speeds.values())
    work = costs.rows * (whole.flops + whole.traffic_bytes * per_byte) + whole.num_ops * per_op
    moved = whole.parameter_bytes * (WEIGHT_MOVES + OPTIMIZER_MOVES) * per_byte
    return (FORWARD_AND_BACKWARD * work + moved) / math.fsum(device.speed for device in devices)
