"""One pipeline on paper: what its parts cost, and the jobs of its devices, each when its input has arrived.

Every device does its schedule's entries in order. As in the runtime, what an entry has made leaves when its device
begins a later one: as a rule the next, but where devices send by themselves what `plans.schedule.departures` says. It
leaves once its receiver waits for it, and travels beside whatever the sender does then; a slice that several devices of
a node get from another is passed on inside. The backward that completes the gradients is cut where a bucket of them is
ready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.beside import seen_shares
from hetu_fx.planner.price.link_load import price_hand_over, turn_traffic
from hetu_fx.planner.price.schedule_seconds import Turn, turns
from hetu_fx.planner.price.stage_seconds import StageCosts, compute_lines, stage_costs
from hetu_fx.planner.price.ways import Bucket
from hetu_fx.planner.simulate.fold import Folding, unfold
from hetu_fx.planner.simulate.jobs import Jobs, Task
from hetu_fx.planner.values.footprint import maximum_at
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import DeviceDeal, PartedPipeline
from hetu_fx.plans.plan import Plan, Schedule
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
