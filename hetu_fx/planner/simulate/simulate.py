"""Run a plan on paper: when each device and link would do what, and what each device would hold.

Discrete events over compute and links (`events`) in the order that the runtime keeps: parameters are gathered,
pipelines run their schedules, gradients travel in buckets beside the last backward, each device updates what it owns.
Times are those of the cost model; what it leaves out is found here: waiting, overlap, links that several messages
share, and micro-batches and pipelines that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE
from hetu_fx.planner.price.placement import shards_of, tied_holders
from hetu_fx.planner.price.step import places_of, row_sum_seconds
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.simulate.events import play
from hetu_fx.planner.simulate.jobs import Jobs, Simulation, ring_traffic, simulation
from hetu_fx.planner.simulate.pipeline import Bucket, PipelineLane, buckets
from hetu_fx.planner.simulate.pipeline_jobs import Held, PipelineJobs
from hetu_fx.planner.simulate.schedules import PaperSchedule
from hetu_fx.planner.values.device_memory import HeldShard
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Stage, split_rows


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


class _StepJobs:
    """The jobs of a step."""

    def __init__(self, plan: Plan, costs: ProgramCosts, cluster: Cluster, schedule: PaperSchedule) -> None:
        self.plan, self.cluster, self.schedule = plan, cluster, schedule
        self.costs = costs.under(plan)
        self.jobs = Jobs(cluster)
        self.lanes = [PipelineLane.of(pipeline, schedule, self.costs, cluster) for pipeline in plan.pipelines]
        self.buckets = buckets(costs, [lane.stops for lane in self.lanes])
        speeds = {rank: cluster.device(rank).speed for rank in plan.devices}
        self.shards: dict[int, HeldShard] = shards_of(plan, costs, speeds)

    def simulation(self) -> Simulation:
        """Add all jobs, play them and sum up."""
        gathered = self._meet(self._gather())
        rows = split_rows(self.costs.rows, self.plan)
        pipelines = []
        for number, lane in enumerate(self.lanes):
            own = [count for count in rows[number] if count]
            pipelines.append(PipelineJobs(self.jobs, lane, number, own, self.buckets, gathered))
            pipelines[-1].run(self.schedule)
        self._end(pipelines, gathered)
        lasting = {rank: shard.lasting for rank, shard in self.shards.items()}
        times = play([job.activity for job in self.jobs.all])
        name = f"simulated step: {self.plan.name or self.plan.summary()}"
        groups = [pipeline.devices for pipeline in self.plan.pipelines]
        return simulation(name, self.jobs.all, times, lasting, groups)

    def _meet(self, gathered: dict[int, list[int]]) -> dict[int, list[int]]:
        """Add the time of the sums over rows in the middle of the step, all before it; return what devices wait for."""
        seconds = row_sum_seconds(self.plan, self.costs, self.cluster)
        if not seconds:
            return gathered
        after = sorted({job for jobs in gathered.values() for job in jobs})
        job = self.jobs.transfer("rows", "sums over rows", Line(seconds), (), after, self.plan.devices)
        return {rank: [job] for rank in self.plan.devices}

    def _gather(self) -> dict[int, list[int]]:
        """Add the gathers of parameters, a few buckets at once; return by device those that it waits for."""
        found: list[int] = []
        waits: dict[int, list[int]] = {}
        for bucket in reversed(self.buckets if self.plan.zero else ()):
            if not self._travels(bucket):
                continue
            after = found[-BUCKETS_AT_ONCE:][:1] if len(found) >= BUCKETS_AT_ONCE else []
            found.append(self._travel("gather", bucket, after, 1))
            for rank in self._members(bucket):
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
            idle = [job for rank in self._members(bucket) for job in gathered.get(rank, ())]
            job = self._travel("gradients", bucket, [*(job for job in made if job is not None), *idle], 0)
            for rank in self._members(bucket):
                waits[rank].append(job)
        for job, ranks in self._tied("gradients", waits):
            for rank in ranks:
                waits[rank].append(job)
        idle_ranks = {rank for p in pipelines if not p.rows for rank in p.lane.pipeline.devices}
        for place in places_of(self.plan, self.costs, self.cluster):
            seconds = {place.rank: place.update_seconds(self.plan, self.cluster)}
            start, end = self._update_memory(place.rank, place.rank not in idle_ranks)
            self.jobs.compute("optimizer", "optimizer", seconds, waits.get(place.rank, ()), start, end)

    def _tied(self, kind: str, waits: Mapping[int, Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
        """Add the ways of parameters that several stages read, between one device of each; return those with devices.

        Their memory counts with that of the buckets.
        """
        found = []
        for lane in self.lanes:
            for one, held in tied_holders(self.costs, lane.stops):
                stages = [lane.parts.stages[part] for part in held]
                ring = tuple(dict.fromkeys(stage.devices[0] for stage in stages))
                ranks = tuple(dict.fromkeys(rank for stage in stages for rank in stage.devices))
                if len(ring) > 1:
                    after = sorted({job for rank in ranks for job in waits.get(rank, ())})
                    found.append((self._tied_job(kind, one.bytes, ring, after, ranks), ranks))
        return found

    def _tied_job(self, kind: str, size: float, ring: Sequence[int], after: Sequence[int], ranks: Sequence[int]) -> int:
        term = 1 if kind == "gather" else 0
        empty, full = (sync_seconds(n, ring, self.cluster, self.plan.zero)[term] for n in (0.0, size))
        traffic = ring_traffic([ring], size, 1 if self.plan.zero else 2)
        return self.jobs.transfer(kind, f"{kind} tied", Line(empty, full - empty), traffic, after, ranks)

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
        return frozenset(rank for bucket in self.buckets if self._travels(bucket) for rank in self._members(bucket))

    def _travels(self, bucket: Bucket) -> bool:
        """Tell whether several devices hold the same of a bucket's parameters."""
        groups = self._groups(bucket)
        return len(groups) > 1 or groups[0].shares_sequence

    def _groups(self, bucket: Bucket) -> list[Stage]:
        return [lane.parts.stages[part] for lane, part in zip(self.lanes, bucket.holders, strict=True)]

    def _members(self, bucket: Bucket) -> list[int]:
        return [rank for group in self._groups(bucket) for rank in group.devices]

    def _held(self, bucket: Bucket, group: Stage) -> dict[int, float]:
        """Return the bytes of a bucket's parameters by device of a group."""
        parts = [self.costs.on(group, i).between(bucket.start, bucket.stop) for i in range(len(group.devices))]
        triples = zip(group.devices, group.work_shares, parts, strict=True)
        return {rank: part.parameter_bytes_at(share) for rank, share, part in triples}

    def _travel(self, kind: str, bucket: Bucket, after: Sequence[int], term: int) -> int:
        """Add a bucket's way to or from home; `term` picks its seconds from those of `sync_seconds`."""
        line = reduce(Line.upper, self._travel_lines(bucket, term))
        traffic = ring_traffic(*self._rings(bucket), 1 if self.plan.zero else 2)
        name = f"{kind} {bucket.start}-{bucket.stop}"
        start, end = self._travel_memory(kind, bucket)
        return self.jobs.transfer(kind, name, line, traffic, after, self._members(bucket), start, end)

    def _travel_lines(self, bucket: Bucket, term: int) -> Iterator[Line]:
        """Yield latency and seconds of a bucket's way from or to each device, with one of each other group.

        Rings of as many bytes that go through the same nodes take the same, and are priced once.
        """
        groups, node_of, known = self._groups(bucket), self.cluster.node_of, set[tuple[float, object]]()
        firsts = [group.devices[0] for group in groups]
        for number, group in enumerate(groups):
            for rank, size in self._held(bucket, group).items():
                own = (rank, *group.beside(rank))
                there, here = [node_of(firsts[number])], [node_of(peer) for peer in own]
                key = size, None if here == there else (*there, *here)
                if key not in known:
                    known.add(key)
                    ranks = (*firsts[:number], *own, *firsts[number + 1 :])
                    empty, full = (sync_seconds(n, ranks, self.cluster, self.plan.zero)[term] for n in (0.0, size))
                    yield Line(empty, full - empty)

    def _rings(self, bucket: Bucket) -> tuple[list[list[int]], float]:
        """Return the rings that a bucket goes around, one for each part of its weights, and the bytes of each."""
        whole = self.costs.between(bucket.start, bucket.stop).parameter_bytes
        columns = [group.context_groups for group in self._groups(bucket)]
        largest = max(map(len, columns))
        rings = [[rank for column in columns for rank in column[i % len(column)]] for i in range(largest)]
        return rings, whole / largest

    def _travel_memory(self, kind: str, bucket: Bucket) -> tuple[Held, Held]:
        """Return what devices hold more: gathered copies and messages until they are there, gradients' to the end."""
        start = Held()
        for group in self._groups(bucket):
            for rank, size in self._held(bucket, group).items():
                shard = self.shards[rank]
                whole = 2 * shard.copied if kind == "gather" else shard.messages
                start[rank] = whole * size / shard.parameters if shard.parameters else 0.0
        return start, {rank: -count for rank, count in start.items()} if kind == "gather" else {}
