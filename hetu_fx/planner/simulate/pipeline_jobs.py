"""The jobs of one pipeline: every device does its schedule's entries in order, each when its input has arrived.

As in the runtime, a message starts when its sender has made it and its receiver waits for it, and travels beside
whatever the sender does next. The backward that completes the gradients is cut where a bucket of them is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetu_fx.errors import StateError
from hetu_fx.planner.simulate.jobs import Jobs, Traffic
from hetu_fx.planner.simulate.pipeline import Bucket, PipelineLane
from hetu_fx.planner.simulate.schedules import PaperSchedule, table
from hetu_fx.planner.values.footprint import highest_at
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.schedule import Action, Phase

_COMPLETES = (Phase.BACKWARD, Phase.WEIGHT_GRADIENT)

Held = dict[int, float]
"""Bytes by device."""

_Done = tuple[Phase, int, int]
"""A phase of a micro-batch of a part, by number."""


@dataclass
class PipelineJobs:
    """Adds a pipeline's jobs.

    Attributes:
        jobs: to add to.
        lane: the pipeline.
        number: its number in the plan.
        rows: of each micro-batch.
        buckets: those of all gradients, in the order in which they become ready.
        ready: jobs that every device waits for at first.
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
    made: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[int, tuple[int, ...]] = field(default_factory=dict)
    sent: Held = field(default_factory=dict)
    _done: dict[_Done, int] = field(default_factory=dict)

    def run(self, schedule: PaperSchedule) -> None:
        """Add everything."""
        stages = range(self.lane.num_stages)
        for stage in stages:
            devices = self.lane.pipeline.stages[stage].devices
            self.last[stage] = tuple(sorted({job for rank in devices for job in self.ready.get(rank, ())}))
        left = [list(row) for row in table(schedule, self.lane.num_stages, len(self.rows))]
        while any(left):
            before = sum(map(len, left))
            for stage in stages:
                while left[stage] and self._is_there(self._input(stage, left[stage][0])):
                    self._do(stage, left[stage].pop(0))
            if sum(map(len, left)) == before:
                raise StateError(f"{schedule} on {len(left)} stages stops at {[row[0] for row in left if row]}")
        for stage in stages:
            devices = self.lane.pipeline.stages[stage].devices
            freed = {rank: -self.sent.get(rank, 0.0) for rank in devices}
            self.jobs.compute("finish", "finish", dict.fromkeys(devices, 0.0), self.last[stage], freed)

    def _part(self, stage: int, entry: Action) -> int:
        return entry.chunk * self.lane.num_stages + stage

    def _is_there(self, needed: _Done | None) -> bool:
        return needed is None or needed in self._done

    def _input(self, stage: int, entry: Action) -> _Done | None:
        """Return what an entry's input comes from; None where it needs no other."""
        part, m = self._part(stage, entry), entry.micro_batch
        match entry.phase:
            case Phase.FORWARD if part == 0:
                return None
            case Phase.FORWARD:
                return Phase.FORWARD, m, part - 1
            case Phase.WEIGHT_GRADIENT:
                return Phase.INPUT_GRADIENT, m, part
            case phase if part + 1 < len(self.lane.costs):
                return phase, m, part + 1
            case _:
                return Phase.FORWARD, m, part

    def _do(self, stage: int, entry: Action) -> None:
        part, rows = self._part(stage, entry), self.rows[entry.micro_batch]
        after = self._arrived(stage, entry, part, rows)
        borders = self._borders(part, entry)
        seconds = self.lane.compute(part, entry.phase, rows)
        reductions = self.lane.reductions(part, entry.phase, rows)
        start, end = self._memory(part, entry, rows)
        name = f"{entry.phase} {entry.micro_batch}" + (f" of chunk {entry.chunk}" if self._has_chunks else "")
        pieces = self._pieces(part, borders)
        for index, (bucket, weight) in enumerate(pieces):
            is_last = index + 1 == len(pieces)
            own = {rank: weight * value for rank, value in seconds.items()}
            given, freed = (start if index == 0 else {}), (end if is_last else {})
            job = self.jobs.compute(entry.phase, name, own, after, given, freed)
            job = self._reduced(part, entry, rows, Line(reductions.fixed * weight, reductions.slope * weight), job)
            after = (job,)
            if bucket is not None:
                self.made[part, bucket] = job
        self.last[stage] = after
        self._done[entry.phase, entry.micro_batch, part] = after[0]

    @property
    def _has_chunks(self) -> bool:
        return len(self.lane.costs) > self.lane.num_stages

    def _arrived(self, stage: int, entry: Action, part: int, rows: int) -> tuple[int, ...]:
        """Return what an entry waits for; adds the message that brings its input, if one does."""
        needed, own = self._input(stage, entry), self.last[stage]
        if needed is None:
            return own
        *_, source = needed
        after = (*own, self._done[needed])
        if source == part:
            return after
        is_forward = source < part
        costs = self.lane.costs[source]
        line = costs.to_next if is_forward else costs.to_previous
        if not (line.fixed or line.slope):
            return after
        size = self.lane.handed_bytes(max(part, source), rows)
        ends = self.lane.parts.stages[source].devices, self.lane.parts.stages[part].devices
        traffic = _messages(*ends, size)
        held = {sender: count for sender, _, count in traffic}
        for sender, count in held.items():
            self.sent[sender] = self.sent.get(sender, 0.0) + count
        whole = Line(line.fixed, line.slope * rows)
        name = f"send {entry.micro_batch}"
        return (self.jobs.transfer("send", name, whole, traffic, after, ends[0], held),)

    def _reduced(self, part: int, entry: Action, rows: int, line: Line, job: int) -> int:
        if not (line.fixed or line.slope):
            return job
        devices = self.lane.parts.stages[part].devices
        traffic = self.lane.reduction_traffic(part, entry.phase, rows)
        name = f"sum {entry.micro_batch}"
        return self.jobs.transfer("communication", name, line, traffic, (job,), devices)

    def _borders(self, part: int, entry: Action) -> list[int]:
        """Return the numbers of the buckets that an entry completes; none but in a part's last backward."""
        if entry.phase not in _COMPLETES or entry.micro_batch + 1 < len(self.rows):
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
        is_first = entry.micro_batch == 0
        costs = self.lane.costs[part]
        for position, rank in enumerate(costs.stage.devices):
            print_ = self.lane.footprint(part, position)
            kept = highest_at((print_.kept,), rows)
            most = highest_at(print_.forward if entry.phase is Phase.FORWARD else print_.later, rows)
            made = costs.parameter_bytes(position) if is_first else 0.0
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


def _messages(senders: Sequence[int], receivers: Sequence[int], num_bytes: float) -> Traffic:
    """Return one message per receiver, from the sender at its place; each takes all, as one of a whole value does."""
    return tuple((senders[i % len(senders)], rank, num_bytes) for i, rank in enumerate(receivers))
