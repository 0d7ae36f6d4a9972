"""Run a plan on paper: when each device and link would do what, and what each device would hold.

Discrete events over compute and links (`events`) in the order that the runtime keeps: parameters are gathered,
pipelines run their schedules, gradients travel in buckets beside the last backward, each device updates what it owns.
Times are those of the cost model; what it leaves out is found here: waiting, overlap, links that several messages
share, and micro-batches and pipelines that differ. `simulation` says which of these made which difference.

Where only seconds are asked for, pipelines that are alike are simulated as one (`fold`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce

from hetu_fx.base.once import once
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES, BUCKETS_AT_ONCE
from hetu_fx.planner.price.links import turn_traffic
from hetu_fx.planner.price.placement import shards_of, tied_holders
from hetu_fx.planner.price.shared_links import rings_of
from hetu_fx.planner.price.step import predict, row_sum_seconds
from hetu_fx.planner.price.step_end import sync_seconds, update_line
from hetu_fx.planner.simulate.events import play
from hetu_fx.planner.simulate.fold import Fold
from hetu_fx.planner.simulate.jobs import Jobs, Task
from hetu_fx.planner.simulate.pipeline import Bucket, PipelineLane, buckets
from hetu_fx.planner.simulate.pipeline_jobs import Held, PipelineJobs
from hetu_fx.planner.simulate.schedules import PaperSchedule
from hetu_fx.planner.simulate.simulation import Simulation, simulation
from hetu_fx.planner.values.device_memory import HeldShard
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Stage, pipeline_rows, split_rows
from hetu_fx.plans.prediction import Prediction


def simulate(plan: Plan, costs: ProgramCosts, cluster: Cluster, *, schedule: PaperSchedule | None = None) -> Simulation:
    """Return what one step would be.

    Args:
        plan: of the step.
        costs: of the program.
        cluster: the devices, with the rates at which they work now.
        schedule: instead of the plan's, one of those that only a simulation can run, perhaps.

    Raises:
        PlanError: a plan that does not fit the program, or a schedule that does not fit the plan.
    """
    return _StepJobs(plan, costs, cluster, schedule or plan.schedule).simulation()


def simulated_seconds(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return how long one step would take, with pipelines that are alike simulated as one.

    Raises `PlanError` for a plan that does not fit the program.
    """
    fold = Fold.of(plan, pipeline_rows(costs.rows, plan), cluster)
    return _StepJobs(plan, costs, cluster, plan.schedule, fold).seconds()


def expect(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Prediction:
    """Return what a step is expected to take, simulated, with every device's seconds and bytes by the closed form.

    Raises `PlanError` for a plan that does not fit the program.
    """
    formula = predict(plan, costs, cluster)
    return replace(formula, seconds=simulated_seconds(plan, costs, cluster), formula_seconds=formula.seconds)


def num_jobs(plan: Plan) -> int:
    """Return about how many jobs a plan's simulation has if all of its pipelines were alike: what it costs."""
    longest = max(plan.pipelines, key=lambda pipeline: pipeline.micro_batches * len(pipeline.stages))
    kinds = len({(len(p.stages), p.micro_batches, p.share, len(p.devices)) for p in plan.pipelines})
    return kinds * 2 * longest.micro_batches * sum(2 + (len(stage.devices) > 1) for stage in longest.stages)


class _StepJobs:
    """The jobs of a step."""

    def __init__(
        self, plan: Plan, costs: ProgramCosts, cluster: Cluster, schedule: PaperSchedule, fold: Fold | None = None
    ) -> None:
        """Without a fold every pipeline is simulated, and memory too."""
        self.plan, self.cluster, self.schedule, self.fold = plan, cluster, schedule, fold
        self.costs = costs.under(plan)
        self.jobs = Jobs(cluster)
        count = len(plan.pipelines)
        self.like = fold.like if fold else tuple(range(count))
        self.lanes = {
            i: PipelineLane.of(plan.pipelines[i], schedule, self.costs, cluster) for i in dict.fromkeys(self.like)
        }
        self.buckets = buckets(costs, [lane.stops for lane in self.lanes.values()])

    @cached_property
    def shards(self) -> dict[int, HeldShard]:
        """Return what each device holds."""
        speeds = {rank: self.cluster.device(rank).speed for rank in self.plan.devices}
        return shards_of(self.plan, self.costs, speeds)

    def simulation(self) -> Simulation:
        """Add all jobs, play them and sum up."""
        self._add()
        lasting = {rank: shard.lasting for rank, shard in self.shards.items()}
        times = play([job.activity for job in self.jobs.all])
        name = f"simulated step: {self.plan.name or self.plan.summary()}"
        groups = [pipeline.devices for pipeline in self.plan.pipelines]
        return simulation(name, self.jobs.all, times, lasting, groups, self.cluster)

    def seconds(self) -> float:
        """Add all jobs, play them, and return how long the step takes."""
        self._add()
        times = play([job.activity for job in self.jobs.all])
        return max(time.end for time in times) - min(time.start for time in times)

    def _add(self) -> None:
        gathered = self._meet(self._gather())
        rows = split_rows(self.costs.rows, self.plan)
        pipelines = []
        for place, (number, lane) in enumerate(self.lanes.items()):
            own = [count for count in rows[number] if count]
            made = PipelineJobs(self.jobs, lane, place, own, self.buckets, gathered, tells_memory=self.fold is None)
            if self.fold is not None:
                made.folded = self.fold.of_pipeline(number)
            made.run(self.schedule)
            pipelines.append(made)
        self._end(pipelines, gathered)

    def _meet(self, gathered: dict[int, list[int]]) -> dict[int, list[int]]:
        """Add the time of the sums over rows in the middle of the step, all before it; return what devices wait for."""
        seconds = row_sum_seconds(self.plan, self.costs, self.cluster)
        if not seconds:
            return gathered
        after = sorted({job for jobs in gathered.values() for job in jobs})
        job = self.jobs.do(self.jobs.transfer("rows", Line(seconds), (), self.plan.devices), "sums over rows", after)
        return {rank: [job] for rank in self.plan.devices}

    def _gather(self) -> dict[int, list[int]]:
        """Add the gathers of parameters, a few buckets at once; return by device those that it waits for."""
        found: list[int] = []
        waits: dict[int, list[int]] = {}
        for bucket in reversed(self.buckets if self.plan.zero else ()):
            if not self._travels(bucket):
                continue
            after = found[-BUCKETS_AT_ONCE:][:1] if len(found) >= BUCKETS_AT_ONCE else []
            found.append(self._travel("gather", bucket, after))
            for rank in self._members(bucket.holders):
                waits.setdefault(rank, []).append(found[-1])
        for job, ranks in self._tied("gather", {}) if self.plan.zero else ():
            for rank in ranks:
                waits.setdefault(rank, []).append(job)
        return waits

    def _end(self, pipelines: Sequence[PipelineJobs], gathered: dict[int, list[int]]) -> None:
        """Add gradient synchronisation, each bucket as soon as all that hold it have made it, and the updates."""
        waits: dict[int, list[int]] = {rank: list(jobs) for rank, jobs in gathered.items()}
        for pipeline in pipelines:
            for stage, jobs in pipeline.last.items():
                for rank in pipeline.lane.pipeline.stages[stage].devices:
                    waits.setdefault(rank, []).extend(jobs)
        for number, bucket in enumerate(self.buckets):
            if not self._travels(bucket):
                continue
            made = [p.made.get((part, number)) for p, part in zip(pipelines, bucket.holders, strict=True)]
            idle = [job for rank in self._members(bucket.holders) for job in gathered.get(rank, ())]
            job = self._travel("gradients", bucket, [*(job for job in made if job is not None), *idle])
            for rank in self._members(bucket.holders):
                waits[rank].append(job)
        for job, ranks in self._tied("gradients", waits):
            for rank in ranks:
                waits[rank].append(job)
        idle_ranks = {rank for p in pipelines if not p.rows for rank in p.lane.pipeline.devices}
        for rank, seconds in self._updates():
            start, end = self._update_memory(rank, rank not in idle_ranks) if self.fold is None else (None, None)
            self.jobs.do(self.jobs.compute("optimizer", {rank: seconds}), "optimizer", waits.get(rank, ()), start, end)

    def _updates(self) -> Iterator[tuple[int, float]]:
        """Yield the seconds of the update of what each device owns, and of what a step takes besides."""
        count = len(self.plan.pipelines)
        for lane in self.lanes.values():
            for index, stage in enumerate(lane.pipeline.stages):
                chunks = lane.costs[index :: lane.num_stages]
                for position, rank in enumerate(stage.devices):
                    held = sum(chunk.parameter_bytes(position) for chunk in chunks)
                    update = update_line(held, self.cluster.device(rank))
                    yield rank, update(1 / (count * stage.context) if self.plan.zero else 1.0)

    def _tied(self, kind: str, waits: Mapping[int, Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
        """Add the ways of parameters that several stages read, between one device of each; return those with devices.

        Their memory counts with that of the buckets.
        """
        found = []
        for number, lane in self.lanes.items():
            for one, held in tied_holders(self.costs, lane.stops):
                stages = [lane.parts.stages[part] for part in held]
                ring = tuple(dict.fromkeys(stage.devices[0] for stage in stages))
                ranks = tuple(dict.fromkeys(rank for stage in stages for rank in stage.devices))
                if len(ring) > 1:
                    after = sorted({job for rank in ranks for job in waits.get(rank, ())})
                    task = self._tied_task(kind, one.bytes, ring, ranks, number)
                    found.append((self.jobs.do(task, f"{kind} tied", after), ranks))
        return found

    def _tied_task(self, kind: str, size: float, ring: Sequence[int], ranks: Sequence[int], number: int) -> Task:
        line = self._line(kind, size, tuple(ring))
        traffic = turn_traffic(ring, size, self._turns, self.cluster)
        folded = (self.fold.of_pipeline(number),) if self.fold else ()
        return self.jobs.transfer(kind, line, traffic, ranks, *folded)

    @property
    def _turns(self) -> int:
        """Return how often the bytes of a bucket go around, each way."""
        return 1 if self.plan.zero else 2

    def _update_memory(self, rank: int, has_gradients: bool) -> tuple[Held, Held]:
        """Return what a device holds more from the start of its update, and from its end, without gradients."""
        shard = self.shards[rank]
        needed = shard.owned_gradients + shard.update_bytes
        made = shard.gradients if has_gradients else 0.0
        travelled = shard.messages if rank in self._travellers else 0.0
        return {rank: needed - made - travelled}, {rank: -needed}

    @cached_property
    def _travellers(self) -> frozenset[int]:
        """Return the devices whose gradients travel."""
        return frozenset(
            rank for bucket in self.buckets if self._travels(bucket) for rank in self._members(bucket.holders)
        )

    def _travels(self, bucket: Bucket) -> bool:
        """Tell whether several devices hold the same of a bucket's parameters."""
        groups = self._groups(bucket.holders)
        return len(groups) > 1 or groups[0].shares_sequence

    @once
    def _groups(self, holders: Sequence[int]) -> list[Stage]:
        """Return the stage of each pipeline that holds a bucket, of all pipelines."""
        of_lane = dict(zip(self.lanes, holders, strict=True))
        found = []
        for number, like in enumerate(self.like):
            lane, part = self.lanes[like], of_lane[like]
            found.append(lane.parts.stages[part] if number == like else self.plan.pipelines[number].stages[part])
        return found

    @once
    def _members(self, holders: Sequence[int]) -> list[int]:
        """Return the devices that hold a bucket, of pipelines that are simulated."""
        pairs = zip(self.lanes.values(), holders, strict=True)
        return [rank for lane, part in pairs for rank in lane.parts.stages[part].devices]

    def _travel(self, kind: str, bucket: Bucket, after: Sequence[int]) -> int:
        """Add a bucket's way to or from home."""
        start, end = self._travel_memory(kind, bucket) if self.fold is None else (None, None)
        return self.jobs.do(self._way(kind, bucket), f"{kind} {bucket.start}-{bucket.stop}", after, start, end)

    def _way(self, kind: str, bucket: Bucket) -> Task:
        """Return the sends of a bucket: around the rings of those that hold the same of it, all at once."""
        whole = self.costs.between(bucket.start, bucket.stop).parameter_bytes
        line = reduce(Line.upper, (self._line(kind, size, ring) for size, ring in self._sizes(bucket)))
        around = self._around(kind, bucket.holders)
        share = whole / BUCKET_BYTES
        seconds = max(line.slope, share * around.seconds)
        uses = {resource: part * share * around.seconds / seconds for resource, part in around.uses.items()}
        traffic = () if self.fold else around.part(share).traffic
        return Task(kind, around.devices, seconds, uses if seconds else {}, line.fixed, traffic)

    @once
    def _around(self, kind: str, holders: Sequence[int]) -> Task:
        """Return what so many bytes as a bucket should have want of links, whoever holds them."""
        rings = self._rings(holders)
        each = BUCKET_BYTES / len(rings)
        parts = (turn_traffic(ring, each, self._turns, self.cluster) for ring in rings)
        traffic = tuple(itertools.chain.from_iterable(parts))
        folded = (self.fold.of_all,) if self.fold else ()
        return self.jobs.transfer(kind, Line(), traffic, self._members(holders), *folded)

    @once
    def _line(self, kind: str, size: float, ring: tuple[int, ...]) -> Line:
        """Return latency, and seconds, of a collective; the gather's, or that of gradients."""
        term = 1 if kind == "gather" else 0
        empty, full = (sync_seconds(n, ring, self.cluster, self.plan.zero)[term] for n in (0.0, size))
        return Line(empty, full - empty)

    def _sizes(self, bucket: Bucket) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield the bytes of a bucket on each device, and those that it meets: one of each other group."""
        for group, ring in self._meetings(bucket.holders):
            for size in {size for rank, size in self._held(bucket, group).items() if rank in ring}:
                yield size, ring

    @once
    def _meetings(self, holders: Sequence[int]) -> list[tuple[Stage, tuple[int, ...]]]:
        """Return for groups that hold something those that their devices meet, one ring of those that go alike."""
        groups, node_of = self._groups(holders), self.cluster.node_of
        firsts = [group.devices[0] for group in groups]
        known: dict[object, tuple[Stage, tuple[int, ...]]] = {}
        for number, group in enumerate(groups):
            for position, rank in enumerate(group.devices):
                own = (rank, *group.beside(rank))
                there, here = [node_of(firsts[number])], [node_of(peer) for peer in own]
                key = group.axes, position, None if here == there else (*there, *here)
                if key not in known:
                    known[key] = group, tuple(sorted((*firsts[:number], *own, *firsts[number + 1 :])))
        return list(known.values())

    def _held(self, bucket: Bucket, group: Stage) -> dict[int, float]:
        """Return the bytes of a bucket's parameters by device of a group."""
        parts = [self.costs.on(group, i).between(bucket.start, bucket.stop) for i in range(len(group.devices))]
        triples = zip(group.devices, group.work_shares, parts, strict=True)
        return {rank: part.parameter_bytes_at(share) for rank, share, part in triples}

    @once
    def _rings(self, holders: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the rings that a bucket goes around, one for each part of its weights."""
        return rings_of(self._groups(holders))

    def _travel_memory(self, kind: str, bucket: Bucket) -> tuple[Held, Held]:
        """Return what devices hold more: gathered copies and messages until they are there, gradients' to the end."""
        start = Held()
        for group in self._groups(bucket.holders):
            for rank, size in self._held(bucket, group).items():
                shard = self.shards[rank]
                whole = 2 * shard.copied if kind == "gather" else shard.messages
                start[rank] = whole * size / shard.parameters if shard.parameters else 0.0
        return start, {rank: -count for rank, count in start.items()} if kind == "gather" else {}
