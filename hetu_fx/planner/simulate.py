"""Run a plan on paper: when each device would do what.

A discrete-event simulation in the order that the runtime keeps (`hetu_fx.schedule`): a forward waits for
the stage before it, a backward for the stage after it and for its own forward, a device for what it did
before. Then all replicas wait for each other, sync gradients and update. Times are those of the cost model,
so the difference to `predict` is its formula for pipelines, which charges every micro-batch the largest
one's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.cost import FORWARD_AND_BACKWARD, StageCosts, places_of, stage_costs
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.plans import Pipeline, Plan, Schedule, split_rows
from hetu_fx.schedule import Action, Phase, actions
from hetu_fx.timeline import Event, Timeline
from hetu_fx.topology import Cluster


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for each micro-batch: forward, backward, and sending their results on."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    to_next: tuple[float, ...]
    to_previous: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a stage does: an action, or sending its result."""

    stage: int
    kind: str
    micro_batch: int
    start_seconds: float
    end_seconds: float


def simulate(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Timeline:
    """Return the timeline of one step: gather, pipelines, gradient sync, optimizer.

    Raises `PlanError` for a plan that does not fit the program.
    """
    ends = {place.rank: place.end_terms(plan, cluster) for place in places_of(plan, costs, cluster)}
    gather = max(gather for _, gather, _ in ends.values())
    events = [Event(rank, "gather", 0.0, g, "gather") for rank, (_, g, _) in ends.items() if g]
    for pipeline, rows in zip(plan.pipelines, split_rows(costs.rows, plan), strict=True):
        events += _pipeline_events(pipeline, rows, plan.schedule, costs.under(plan), cluster, gather)
    done = max((event.end_seconds for event in events), default=0.0)
    synced = done + max(sync for sync, _, _ in ends.values())
    for rank, (sync, _, update) in ends.items():
        events += [Event(rank, "gradients", done, done + sync, "gradients")] if sync else []
        events.append(Event(rank, "optimizer", synced, synced + update, "optimizer"))
    return Timeline(tuple(events), f"simulated step: {plan.name or plan.summary()}")


def _pipeline_events(
    pipeline: Pipeline,
    rows: Sequence[int],
    schedule: Schedule,
    costs: ProgramCosts,
    cluster: Cluster,
    start: float,
) -> Iterator[Event]:
    micro_rows = [count for count in rows if count]
    times = [stage_times(stage, micro_rows) for stage in stage_costs(pipeline, costs, cluster)]
    for span in run_pipeline(times, schedule):
        for rank in pipeline.stages[span.stage].devices:
            name = f"{span.kind} {span.micro_batch}"
            yield Event(rank, name, start + span.start_seconds, start + span.end_seconds, span.kind)


def stage_times(costs: StageCosts, micro_rows: Sequence[int]) -> StageTimes:
    """Return the times of a stage for micro-batches of so many rows."""
    compute = costs.slowest_compute
    forward = [compute(n) / FORWARD_AND_BACKWARD + costs.sums(n) for n in micro_rows]
    both = [compute(n) + costs.tensor_parallel(n) for n in micro_rows]
    return StageTimes(
        forward=tuple(forward),
        backward=tuple(whole - part for whole, part in zip(both, forward, strict=True)),
        to_next=tuple(costs.to_next(n) for n in micro_rows),
        to_previous=tuple(costs.to_previous(n) for n in micro_rows),
    )


def run_pipeline(stages: Sequence[StageTimes], schedule: Schedule) -> list[Span]:
    """Return what the stages of one pipeline do, in order of being decided; the first starts at 0."""
    run = _Run(stages, schedule)
    while run.advance():
        pass
    return run.spans


class _Run:
    """The state of a simulation: what each stage has left, when it is free, and what has arrived when."""

    def __init__(self, stages: Sequence[StageTimes], schedule: Schedule) -> None:
        count, micro_batches = len(stages), len(stages[0].forward)
        self._stages, self._last = stages, count - 1
        self._left = [list(actions(schedule, stage, count, micro_batches)) for stage in range(count)]
        self._free = [0.0] * count
        self._arrived = {(0, Phase.FORWARD, m): 0.0 for m in range(micro_batches)}
        self.spans: list[Span] = []

    def advance(self) -> bool:
        """Let every stage do what it can; tell whether any did something."""
        before = len(self.spans)
        for stage, left in enumerate(self._left):
            while left and (stage, left[0].phase, left[0].micro_batch) in self._arrived:
                self._do(stage, left.pop(0))
        return len(self.spans) > before

    def _do(self, stage: int, action: Action) -> None:
        times, m = self._stages[stage], action.micro_batch
        if action.phase is Phase.FORWARD:
            self._span(stage, action, times.forward[m])
            receiver, seconds = stage + 1, times.to_next[m]
        else:
            self._span(stage, action, times.backward[m])
            receiver, seconds = stage - 1, times.to_previous[m]
        if action.phase is Phase.FORWARD and stage == self._last:
            self._arrived[stage, Phase.BACKWARD, m] = self._free[stage]
        elif 0 <= receiver <= self._last:
            self._send(stage, receiver, action, seconds)

    def _send(self, stage: int, receiver: int, action: Action, seconds: float) -> None:
        start = self._free[stage]
        self._free[stage] = self._arrived[receiver, action.phase, action.micro_batch] = start + seconds
        if seconds:
            self.spans.append(Span(stage, "send", action.micro_batch, start, self._free[stage]))

    def _span(self, stage: int, action: Action, seconds: float) -> None:
        arrived = self._arrived[stage, action.phase, action.micro_batch]
        start = max(self._free[stage], arrived)
        self._free[stage] = start + seconds
        self.spans.append(Span(stage, action.phase.value, action.micro_batch, start, start + seconds))
