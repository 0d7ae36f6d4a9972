"""Run a plan on paper: when each device and link would do what, and what each device would hold.

Discrete events over compute and links (`events`) in the order that the runtime keeps: parameters are gathered, hosts do
what a step takes besides, pipelines run their schedules, gradients travel in buckets beside the last backward, each
device updates what it owns. Times are those of the cost model; what it leaves out is found here: waiting, overlap,
links that several messages share, and micro-batches and pipelines that differ. `simulation` says which of these made
which difference.

Where only seconds are asked for, pipelines that are alike are simulated as one (`fold`).

One pipeline on paper: what its parts cost, and the jobs of its devices, each when its input has arrived. Every device
does its schedule's entries in order. As in the runtime, what an entry has made leaves when its device begins a later
one: as a rule the next, but where devices send by themselves what `plans.schedule.departures` says. It leaves once its
receiver waits for it, and travels beside whatever the sender does then; a slice that several devices of a node get from
another is passed on inside. The backward that completes the gradients is cut where a bucket of them is ready.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.beside import seen_shares
from hetu_fx.planner.price.link_load import Resource, price_hand_over, turn_traffic
from hetu_fx.planner.price.placement import device_shards
from hetu_fx.planner.price.schedule_seconds import Turn, turns
from hetu_fx.planner.price.stage_seconds import StageCosts, compute_lines, stage_costs
from hetu_fx.planner.price.step import PricedStep, predict, row_sum_seconds
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.price.ways import Bucket, Direction, Holders, HomeWay, buckets, tied_ways
from hetu_fx.planner.simulate.fold import Fold, Folding, unfold
from hetu_fx.planner.simulate.jobs import Jobs, Task
from hetu_fx.planner.simulate.simulation import Simulation, simulation
from hetu_fx.planner.values.footprint import maximum_at
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import DeviceDeal, PartedPipeline
from hetu_fx.plans.plan import Plan, Schedule, pipeline_rows, split_rows
from hetu_fx.plans.prediction import Prediction
from hetu_fx.plans.schedule import Action, Phase, at_once, departures

_COMPLETES = (Phase.BACKWARD, Phase.WEIGHT_GRADIENT)

Held = dict[int, float]
"""Bytes by device."""


@dataclass(frozen=True, slots=True)
class PipelineLane:
    """A pipeline, and what each of its parts costs.

    `seen` says what share products do not hide of what a part's sums take, forward and backward.
    """

    pipeline: PartedPipeline
    costs: tuple[StageCosts, ...]
    program: ProgramCosts
    cluster: Cluster
    seen: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, plan: Plan, number: int, rows: int, program: ProgramCosts, cluster: Cluster) -> PipelineLane:
        """Return a pipeline of a plan, by its number, whose largest micro-batch has so many rows.

        Raises `PlanError` where it does not fit the program.
        """
        pipeline = PartedPipeline.of(plan.pipelines[number], program.num_blocks, plan.chunks)
        costs = stage_costs(pipeline, program, cluster)
        seen = tuple(seen_shares(one, max(1, rows), plan.schedule, cluster) for one in costs)
        return cls(pipeline, costs, program, cluster, seen)

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ranks of all stages, in order."""
        return self.pipeline.pipeline.devices

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage."""
        return tuple(stage.devices for stage in self.pipeline.pipeline.stages)

    def weights(self, part: int, blocks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Return how a part's compute falls on ranges [start, stop) of its blocks, in proportion."""
        stage = self.pipeline.parts[part]
        program = self.program.on(stage)
        ranges = [compute_lines(stage, program.stage(start, stop), self.cluster) for start, stop in blocks]
        weights = [max(line.slope for line in lines) for lines in ranges]
        total = sum(weights)
        return tuple(weight / total if total else 1 / len(weights) for weight in weights)


@dataclass
class PipelineJobs:
    """Adds a pipeline's jobs.

    Attributes:
        jobs: to add to.
        lane: the pipeline.
        number: its number among those that are simulated.
        rows: of each micro-batch.
        buckets: those of all gradients, in the order in which they become ready.
        ready: jobs that every device waits for at first.
        folded: what its messages come to with those of pipelines that it stands for.
        tells_memory: work out what devices hold.
        made: the job after which a part's gradients of a bucket are complete, by (part, number of the bucket).
        last: the last jobs of every stage.
        sent: bytes by device of what it has sent, which is held until its pipeline is through.
    """

    jobs: Jobs
    lane: PipelineLane
    number: int
    rows: Sequence[int]
    buckets: Sequence[Bucket]
    ready: Mapping[int, Sequence[int]]
    folded: Folding = unfold
    tells_memory: bool = True
    made: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sent: Held = field(default_factory=dict)

    def run(self, schedule: Schedule) -> None:
        """Add everything."""
        deal = self._deal
        for stage, devices in enumerate(self.lane.stages):
            self.last[stage] = tuple(sorted({job for rank in devices for job in self.ready.get(rank, ())}))
        self._ended: list[list[int]] = [[] for _ in range(deal.num_stages)]  # the last job of every entry of a stage
        are_hosts = all(self.jobs.cluster.device(rank).kind == "cpu" for rank in self.lane.devices)
        # a host sends while it does something else
        in_order = turns(schedule, deal, len(self.rows), at_once if are_hosts else departures)
        self._make_tasks({turn.action.phase for turn in in_order})
        for turn in in_order:
            self._do(turn)
        self._leave_last()
        for stage, devices in enumerate(self.lane.stages) if self.tells_memory else ():
            freed = {rank: -self.sent.get(rank, 0.0) for rank in devices}
            self.jobs.do(self.jobs.compute("finish", dict.fromkeys(devices, 0.0)), "finish", self.last[stage], freed)

    def _leave_last(self) -> None:
        """Let gradients of other chunks than the first leave when their stage is done, as in the runtime."""
        for number, bucket in enumerate(self.buckets):
            part = bucket.holders[self.number]
            if self.rows and self._deal.chunk(part):
                self.made[part, number] = self.last[self._deal.stage(part)][0]

    @property
    def _deal(self) -> DeviceDeal:
        return self.lane.pipeline.deal

    def _do(self, turn: Turn) -> None:
        stage, part, entry, rows = turn.stage, turn.part, turn.action, self.rows[turn.action.micro_batch]
        after = self._arrived(turn, rows)
        work, sums = self._work[part, entry.phase, rows], self._sums[part, entry.phase, rows]
        start, end = self._memory(part, entry, rows) if self.tells_memory else (None, None)
        name = f"{entry.phase} {entry.micro_batch}" + (f" of chunk {entry.chunk}" if self._deal.chunks > 1 else "")
        pieces = self._pieces(part, self._borders(part, entry))
        for index, (bucket, weight) in enumerate(pieces):
            given, freed = (start if index == 0 else None), (end if index + 1 == len(pieces) else None)
            job = self.jobs.do(work if weight == 1.0 else work.part(weight), name, after, given, freed)
            if sums is not None:
                job = self.jobs.do(sums if weight == 1.0 else sums.part(weight), f"sum {entry.micro_batch}", (job,))
            after = (job,)
            if bucket is not None:
                self.made[part, bucket] = job
        self.last[stage] = after
        self._ended[stage].append(after[0])

    def _make_tasks(self, phases: Collection[Phase]) -> None:
        """Make what parts do in each phase of a micro-batch of so many rows, and the messages between neighbours."""
        parts = [(part, rows) for part in range(self._deal.num_parts) for rows in dict.fromkeys(self.rows)]
        self._work = {(part, phase, rows): self._compute(part, phase, rows) for part, rows in parts for phase in phases}
        self._sums = {(part, phase, rows): self._summing(part, phase, rows) for part, rows in parts for phase in phases}
        pairs = [(pair, rows) for part, rows in parts if part for pair in ((part - 1, part), (part, part - 1))]
        self._messages = {(source, part, rows): self._handed(source, part, rows) for (source, part), rows in pairs}

    def _compute(self, part: int, phase: Phase, rows: int) -> Task:
        costs = self.lane.costs[part]
        return self.jobs.compute(phase, dict(zip(costs.stage.devices, costs.compute_of(phase, rows), strict=True)))

    def _summing(self, part: int, phase: Phase, rows: int) -> Task | None:
        """Return the sums (gathers, in a ring) of a part's devices; those of the backward are of inputs' gradients."""
        costs, is_forward = self.lane.costs[part], phase is Phase.FORWARD
        line = {1: costs.sums, 0: Line(), -1: costs.returns}[phase.direction]
        if not (line.fixed or line.slope):
            return None
        sizes = [(one, (one.forward if is_forward else one.backward) * rows) for one in costs.rounds]
        sent = (turn_traffic(one.ranks, size, one.kind, self.jobs.cluster) for one, size in sizes)
        line, devices = Line(line.fixed, line.slope * rows), self.lane.pipeline.parts[part].devices
        whole = self.jobs.transfer("communication", line, tuple(chain.from_iterable(sent)), devices, self.folded)
        return whole.seen(self.lane.seen[part][0 if is_forward else 1])

    def _handed(self, source: int, part: int, rows: int) -> tuple[Task, ...]:
        """Return the rounds of messages from one part to another."""
        ends = self.lane.pipeline.parts[source], self.lane.pipeline.parts[part]
        size = self.lane.program.boundary(self.lane.pipeline.stops[max(source, part)]) * rows
        sent = price_hand_over(*ends, size, self.jobs.cluster)
        pairs = [(Line(line.fixed, line.slope * size), sent.traffic(i, size)) for i, line in enumerate(sent.lines)]
        return tuple(
            self.jobs.transfer("send", line, traffic, folded=self.folded)
            for line, traffic in pairs
            if line.fixed or line.slope
        )

    def _arrived(self, turn: Turn, rows: int) -> tuple[int, ...]:
        """Return what an entry waits for; adds the messages that bring its input, if any do."""
        own = self.last[turn.stage]
        if turn.source < 0:
            return own
        ended = self._ended[self._deal.stage(turn.source)]
        after: tuple[int, ...] = (*own, ended[turn.after - 1])
        for task in self._messages[turn.source, turn.part, rows]:
            held = self._sent(task) if self.tells_memory else None
            name = f"send {turn.action.micro_batch}"
            after = (self.jobs.do(task, name, after, held, part_of=ended[turn.made - 1]),)
        return after

    def _sent(self, task: Task) -> Held:
        """Return the bytes of what is sent, which its senders hold until the end."""
        held = Held()
        for sender, _, count in task.traffic:
            held[sender] = held.get(sender, 0.0) + count
        for sender, count in held.items():
            self.sent[sender] = self.sent.get(sender, 0.0) + count
        return held

    def _borders(self, part: int, entry: Action) -> list[int]:
        """Return the numbers of the buckets that an entry completes; none but in a stage's last backward."""
        if entry.phase not in _COMPLETES or entry.micro_batch + 1 < len(self.rows) or entry.chunk:
            return []
        return [i for i, bucket in enumerate(self.buckets) if bucket.holders[self.number] == part]

    def _pieces(self, part: int, completed: Sequence[int]) -> list[tuple[int | None, float]]:
        """Return (bucket, share of the work) of the pieces of an entry."""
        if not completed:
            return [(None, 1.0)]
        blocks = [(self.buckets[i].start, self.buckets[i].stop) for i in completed]
        return list(zip(completed, self.lane.weights(part, blocks), strict=True))

    def _memory(self, part: int, entry: Action, rows: int) -> tuple[Held, Held]:
        """Return the bytes that devices hold more from the start of an entry, and from its end."""
        start, end = Held(), Held()
        costs, (begin, stop) = self.lane.costs[part], self.lane.pipeline.stops[part : part + 2]
        for position, rank in enumerate(costs.stage.devices):
            held = self.lane.program.kept_by(costs.stage, begin, position)
            print_ = held.footprint(begin, stop, costs.share(position))
            kept = maximum_at((print_.kept,), rows)
            most = maximum_at(print_.forward if entry.phase is Phase.FORWARD else print_.later, rows)
            made = costs.parameter_bytes(position) if entry.micro_batch == 0 else 0.0
            match entry.phase:
                case Phase.FORWARD:
                    start[rank], end[rank] = most, kept - most
                case Phase.BACKWARD:
                    start[rank], end[rank] = most - kept, made - most
                case Phase.INPUT_GRADIENT:
                    start[rank], end[rank] = most - kept, kept - most
                case Phase.WEIGHT_GRADIENT:
                    end[rank] = made - kept
        return start, end


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
        home = HomeWay(found, self.costs, self.cluster, self.plan.zero, self.plan.homes)
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
