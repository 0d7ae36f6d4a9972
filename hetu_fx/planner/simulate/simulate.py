"""Run a plan on paper: when each device and link would do what, and what each device would hold.

Discrete events over compute and links (`events`) in the order that the runtime keeps: parameters are gathered, hosts do
what a step takes besides, pipelines run their schedules, gradients travel in buckets beside the last backward, each
device updates what it owns. Times are those of the cost model; what it leaves out is found here: waiting, overlap,
links that several messages share, and micro-batches and pipelines that differ. `simulation` says which of these made
which difference.

Where only seconds are asked for, pipelines that are alike are simulated as one (`fold`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.link_load import Resource
from hetu_fx.planner.price.placement import device_shards
from hetu_fx.planner.price.step import PricedStep, predict, row_sum_seconds
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.price.ways import Bucket, Direction, Holders, HomeWay, buckets, tied_ways
from hetu_fx.planner.simulate.fold import Fold
from hetu_fx.planner.simulate.jobs import Jobs, Task
from hetu_fx.planner.simulate.pipeline import Held, PipelineJobs, PipelineLane
from hetu_fx.planner.simulate.simulation import Simulation, simulation
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import DeviceDeal, PartedPipeline
from hetu_fx.plans.plan import Plan, pipeline_rows, split_rows
from hetu_fx.plans.prediction import Prediction


def simulate(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Simulation:
    """Return what one step would be.

    Args:
        plan: of the step.
        costs: of the program.
        cluster: the devices, with the rates at which they work now.

    Raises:
        PlanError: a plan that does not fit the program.
    """
    return _StepJobs(plan, costs, cluster).simulation()


def simulated_seconds(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return how long one step would take, with pipelines that are alike simulated as one.

    One whose parameters are gathered unit by unit is not simulated: all go through the units together, which the closed
    form has.

    Raises `PlanError` for a plan that does not fit the program.
    """
    if plan.gathers_units:
        return PricedStep(plan, costs, cluster).overlapped_seconds
    fold = Fold.of(plan, pipeline_rows(costs.rows, plan), cluster)
    return _StepJobs(plan, costs, cluster, fold).seconds()


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
    chunks = DeviceDeal.of_stages(len(longest.stages), plan.chunks).chunks
    return kinds * 2 * longest.micro_batches * chunks * sum(2 + (len(stage.devices) > 1) for stage in longest.stages)


@dataclass(frozen=True, slots=True)
class _BucketWay:
    """The way of buckets that the same parts hold.

    Attributes:
        home: to and from their homes, of all pipelines.
        members: the devices that hold them, of pipelines that are simulated.
        loads: for how long as many bytes as a bucket should have keep resources, of such pipelines.
    """

    home: HomeWay
    members: tuple[int, ...]
    loads: Mapping[Resource, float]


class _StepJobs:
    """The jobs of a step."""

    def __init__(self, plan: Plan, costs: ProgramCosts, cluster: Cluster, fold: Fold | None = None) -> None:
        """Without a fold every pipeline is simulated, and memory too."""
        if plan.has_program:
            raise PlanError(
                "the plan has a program, which is simulated op by op, for which the model is needed, not its costs or "
                "its profile alone\nhint: use hetu_fx.simulate(model, batch, plan, cluster), without another schedule"
            )
        if plan.gathers_units:
            raise PlanError(
                "the plan has zero 3: all devices go through its units of parameters together, which is priced and not "
                "simulated\nhint: ask hetu_fx.plan or hetu-fx plan what it takes, or simulate it under zero 2"
            )
        self.plan, self.cluster, self.fold = plan, cluster, fold
        self.costs = costs.under(plan)
        self.jobs = Jobs(cluster)
        self.like = fold.like if fold else tuple(range(len(plan.pipelines)))
        self._rows = split_rows(self.costs.rows, plan)
        self.lanes = {i: self._lane(i) for i in dict.fromkeys(self.like)}
        self.buckets = buckets(costs, [lane.pipeline.stops for lane in self.lanes.values()])
        parts = plan.parts(self.costs.num_blocks)
        self.ways = {one: self._bucket_way(one, parts) for one in dict.fromkeys(b.holders for b in self.buckets)}
        speeds = {rank: cluster.device(rank).speed for rank in plan.devices}
        self.shards = {} if fold else device_shards(plan, self.costs, speeds)

    def _lane(self, number: int) -> PipelineLane:
        rows = self._rows[number]
        return PipelineLane.of(self.plan, number, rows[0], self.costs.of_replica(sum(rows)), self.cluster)

    def _bucket_way(self, holders: Holders, parts: Sequence[PartedPipeline]) -> _BucketWay:
        """Return the way of what these parts hold, of all pipelines."""
        of_lane, found = dict(zip(self.lanes, holders, strict=True)), []
        for number, like in enumerate(self.like):
            pipeline = self.lanes[like].pipeline if number == like else parts[number]
            found.append(pipeline.parts[of_lane[like]])
        home = HomeWay(found, self.costs, self.cluster, self.plan.zero)
        pairs = zip(self.lanes.values(), holders, strict=True)
        members = tuple(rank for lane, part in pairs for rank in lane.pipeline.parts[part].devices)
        loads = home.loads if home.is_needed else {}
        return _BucketWay(home, members, self.fold.of_all(loads) if self.fold else loads)

    def simulation(self) -> Simulation:
        """Add all jobs, play them and sum up."""
        self._add()
        lasting = {rank: shard.lasting for rank, shard in self.shards.items()}
        name = f"simulated step: {self.plan.name or self.plan.summary()}"
        return simulation(name, self.jobs, lasting, [pipeline.devices for pipeline in self.plan.pipelines])

    def seconds(self) -> float:
        """Add all jobs, play them, and return how long the step takes."""
        self._add()
        return self.jobs.seconds()

    def _add(self) -> None:
        gathered = self._prepare(self._meet(self._gather()))
        pipelines = []
        for place, (number, lane) in enumerate(self.lanes.items()):
            own = [count for count in self._rows[number] if count]
            made = PipelineJobs(self.jobs, lane, place, own, self.buckets, gathered, tells_memory=self.fold is None)
            if self.fold is not None:
                made.folded = self.fold.of_pipeline(number)
            made.run(self.plan.schedule)
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

    def _prepare(self, gathered: dict[int, list[int]]) -> dict[int, list[int]]:
        """Add what a step takes on each host; return what devices wait for."""
        ranks = [rank for lane in self.lanes.values() for rank in lane.devices]
        hosts = {rank: self.cluster.device(rank).step_now for rank in ranks}
        prepared = {
            rank: [self.jobs.do(self.jobs.compute("host", {rank: seconds}), "host", gathered.get(rank, ()))]
            for rank, seconds in hosts.items()
            if seconds
        }
        return gathered | prepared

    def _gather(self) -> dict[int, list[int]]:
        """Add the gathers of parameters, a few at once on each device; return by device those that it waits for."""
        waits: dict[int, list[int]] = {}
        for bucket in reversed(self.buckets if self.plan.zero else ()):
            if not self.ways[bucket.holders].home.is_needed:
                continue
            own = [waits.setdefault(rank, []) for rank in self.ways[bucket.holders].members]
            after = sorted({jobs[-BUCKETS_AT_ONCE] for jobs in own if len(jobs) >= BUCKETS_AT_ONCE})
            job = self._travel("gather", bucket, after)
            for jobs in own:
                jobs.append(job)
        for job, ranks in self._tied("gather", {}) if self.plan.zero else ():
            for rank in ranks:
                waits.setdefault(rank, []).append(job)
        return waits

    def _end(self, pipelines: Sequence[PipelineJobs], gathered: dict[int, list[int]]) -> None:
        """Add gradient synchronisation, each bucket as soon as all that hold it have made it, and the updates."""
        waits: dict[int, list[int]] = {rank: list(jobs) for rank, jobs in gathered.items()}
        for pipeline in pipelines:
            for stage, jobs in pipeline.last.items():
                for rank in pipeline.lane.stages[stage]:
                    waits.setdefault(rank, []).extend(jobs)
        sending = set[int]()
        for number, bucket in enumerate(self.buckets):
            if not self.ways[bucket.holders].home.is_needed:
                continue
            members = self.ways[bucket.holders].members
            made = [p.made.get((part, number)) for p, part in zip(pipelines, bucket.holders, strict=True)]
            idle = [job for rank in members for job in gathered.get(rank, ())]
            job = self._travel("gradients", bucket, [*(job for job in made if job is not None), *idle])
            sending.update(members)
            for rank in members:
                waits[rank].append(job)
        for job, ranks in self._tied("gradients", waits):
            for rank in ranks:
                waits[rank].append(job)
        idle_ranks = {rank for p in pipelines if not p.rows for rank in p.lane.devices}
        for rank, seconds in self._updates():
            start, end = None, None
            if self.fold is None:
                start, end = self._update_memory(rank, made=rank not in idle_ranks, sent=rank in sending)
            self.jobs.do(self.jobs.compute("optimizer", {rank: seconds}), "optimizer", waits.get(rank, ()), start, end)

    def _updates(self) -> Iterator[tuple[int, float]]:
        """Yield the seconds of the update of what each device owns."""
        count = len(self.plan.pipelines)
        for lane in self.lanes.values():
            for index, devices in enumerate(lane.stages):
                chunks = [lane.costs[part] for part in lane.pipeline.deal.held(index)]
                for position, rank in enumerate(devices):
                    held = sum(chunk.parameter_bytes(position) for chunk in chunks)
                    owned = held / (count * chunks[0].stage.context) if self.plan.zero else held
                    yield rank, optimizer_seconds(owned, self.cluster.device(rank))

    def _tied(self, kind: Direction, waits: Mapping[int, Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
        """Add the ways of parameters that several stages read, between one device of each; return those with devices.

        Their memory counts with that of the buckets.
        """
        found = []
        for number, lane in self.lanes.items():
            folded = (self.fold.of_pipeline(number),) if self.fold else ()
            for ranks, line, traffic in tied_ways(kind, self.costs, lane.pipeline, self.cluster, self.plan.zero):
                after = sorted({job for rank in ranks for job in waits.get(rank, ())})
                task = self.jobs.transfer(kind, line, traffic, ranks, *folded)
                found.append((self.jobs.do(task, f"{kind} tied", after), ranks))
        return found

    def _update_memory(self, rank: int, *, made: bool, sent: bool) -> tuple[Held, Held]:
        """Return what a device holds more from the start of its update, and from its end, without gradients."""
        shard = self.shards[rank]
        needed = shard.owned_gradients + shard.update_bytes
        before = (shard.gradients if made else 0.0, shard.messages if sent else 0.0)
        return {rank: needed - before[0] - before[1]}, {rank: -needed}

    def _travel(self, kind: Direction, bucket: Bucket, after: Sequence[int]) -> int:
        """Add a bucket's way to or from home."""
        start, end = self._travel_memory(kind, bucket) if self.fold is None else (None, None)
        return self.jobs.do(self._travelling(kind, bucket), f"{kind} {bucket.start}-{bucket.stop}", after, start, end)

    def _travelling(self, kind: Direction, bucket: Bucket) -> Task:
        """Return the sends of a bucket: around the rings of those that hold the same of it, all at once."""
        way, blocks = self.ways[bucket.holders], (bucket.start, bucket.stop)
        line, share = way.home.line(kind, *blocks), way.home.share(*blocks)
        seconds = max(line.slope, share * way.home.busiest)
        uses = {resource: share * load / seconds for resource, load in way.loads.items() if load} if seconds else {}
        traffic = () if self.fold else tuple((a, b, share * size) for a, b, size in way.home.traffic)
        return Task(kind, way.members, seconds, uses, line.fixed, traffic)

    def _travel_memory(self, kind: Direction, bucket: Bucket) -> tuple[Held, Held]:
        """Return what devices hold more: gathered copies and messages until they are there, gradients' to the end."""
        way, start = self.ways[bucket.holders].home, Held()
        for stage in way.stages:
            for rank, size in way.held(stage, bucket.start, bucket.stop).items():
                shard = self.shards[rank]
                whole = 2 * shard.copied if kind == "gather" else shard.messages
                start[rank] = whole * size / shard.parameters if shard.parameters else 0.0
        return start, {rank: -count for rank, count in start.items()} if kind == "gather" else {}
