"""The log of a run: which variant ran each step, how long it took beside what was predicted, and what changed.

An entry is a mapping that JSON can say; a file has one a line (`JsonLines`). Kinds of entries (`event`):

    start       the format, the number of processes, the variants there are
    plan        a variant was added: its name and plan
    health      the devices' straggling rates changed: those that are not 1
    switch      another variant than the step before runs
    built       graphs of a variant were made: their bytes, and the seconds that it took
    evicted     graphs of a variant that did not run were dropped, so that such variants keep to their bound
    moved       homes were changed: the bytes that came before training went on (of all processes), the seconds, and
                why, where homes have followed a plan
    arrived     what optimizers keep has come to those homes: its bytes, the seconds it was on its way beside the step,
                and for how many the step waited
    step        a training step: variant, longest sequence, rows per pipeline, seconds from its start to the next
                batch's, predicted seconds, and the compute seconds of every process; of sequences of mixed lengths
                also what planning it took (`planning_seconds`) and how long the step waited for that
    evaluation  a batch without training: variant, rows and seconds

Steps are told when the next batch starts, for only then is known how long they took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.planner.dispatch.assignment import Planned
from hetu_fx.switching.eviction import GraphEvent
from hetu_fx.switching.migrate.in_flight import HomeEvent
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.variant import Variant

FORMAT = "hetu_fx.log/1"

Entry = Mapping[str, Any]


class Sink(Protocol):
    """What takes the entries of a log."""

    def tell(self, entry: Entry) -> None:
        """Take an entry."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


@dataclass(frozen=True, slots=True)
class State:
    """What a run has done so far; two of them tell what happened in between.

    Attributes:
        step: training steps so far.
        variant: which variant ran last; "" before the first batch.
        rows: its rows per pipeline.
        variants: all there are.
        rates: straggling rates of devices, of those that are not 1.
        planned: of the last batch, if it had sequences of mixed lengths.
        graphs: what has happened to graphs.
        homes: what has happened to homes.
    """

    step: int = 0
    variant: str = ""
    rows: tuple[int, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    planned: Planned | None = None
    graphs: Sequence[GraphEvent] = ()
    homes: Sequence[HomeEvent] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """What is known of a batch once it is over; `compute_seconds` is empty if the processes have not met since."""

    longest: int
    seconds: float
    compute_seconds: tuple[float, ...] = ()


def entries(before: State, after: State, batch: Batch | None) -> Iterator[Entry]:
    """Yield what happened between two states, of which the later one has run `batch` (None: nothing yet)."""
    yield from map(_graph_entry, after.graphs[len(before.graphs) :])
    if batch is not None:
        if before.variant not in ("", after.variant):
            yield {"event": "switch", "step": after.step, "from": before.variant, "to": after.variant}
        yield _batch_entry(before, after, batch)
    yield from map(_home_entry, after.homes[len(before.homes) :])
    for name in after.variants:
        if name not in before.variants:
            yield {"event": "plan", "step": after.step, "name": name, "plan": after.variants[name].plan.to_json()}
    if before.rates != after.rates:
        rates = {str(device): rate for device, rate in after.rates.items()}
        yield {"event": "health", "step": after.step, "rates": rates}


def _graph_entry(event: GraphEvent) -> Entry:
    told = {"event": event.event, "step": event.step, "variant": event.variant, "bytes": event.num_bytes}
    return told | {"seconds": event.seconds} if event.event == "built" else told


def _home_entry(event: HomeEvent) -> Entry:
    told = {"event": event.event, "step": event.step, "bytes": event.num_bytes, "seconds": event.seconds}
    if event.event == "arrived":
        return told | {"waited_seconds": event.waited_seconds}
    return told | {"why": event.why} if event.why else told


def _batch_entry(before: State, after: State, batch: Batch) -> Entry:
    ran = {"variant": after.variant, "longest": batch.longest, "rows": list(after.rows), "seconds": batch.seconds}
    if after.step == before.step:
        return {"event": "evaluation", "step": after.step, **ran}
    planned = after.planned
    predicted = after.variants[after.variant].predicted_seconds if planned is None else planned.seconds
    times: dict[str, Any] = {"predicted_seconds": predicted or None, "compute_seconds": list(batch.compute_seconds)}
    if planned is not None:
        times |= {"planning_seconds": planned.planning_seconds, "waited_seconds": planned.waited_seconds}
    return {"event": "step", "step": after.step, **ran, **times}


class RunLog(AbstractContextManager["RunLog"]):
    """Tells its sinks what a run does, from now until it is closed; a context manager.

    Args:
        runtime: what runs.
        rates: gives the devices' straggling rates.
        sinks: what takes the entries, each with the `time` it was told at (seconds since 1970). None: this process
            tells nothing.
    """

    def __init__(self, runtime: Runtime, rates: Callable[[], Mapping[int, float]], sinks: Sequence[Sink]) -> None:
        self._runtime, self._rates, self._sinks = runtime, rates, sinks
        self._before = State(
            step=runtime.step,
            variants=dict(runtime.variants),
            graphs=tuple(runtime.idle.events),
            homes=tuple(runtime.in_flight.events),
        )
        self._begun: tuple[float, int] | None = None
        names = list(self._before.variants)
        self._tell({"event": "start", "format": FORMAT, "processes": runtime.table.size, "variants": names})

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell of the last batch, and of nothing more."""
        if self._runtime.unwatch(self):
            self._catch_up(())
            for sink in self._sinks:
                sink.close()

    def tell(self) -> dict[str, float]:
        """Say nothing: a log is this process's own."""
        return {}

    def observe(self, facts: StepFacts) -> None:
        """Tell of the batch before, which ends as another one begins."""
        self._catch_up(facts.compute_seconds)
        self._begun = time.perf_counter(), facts.longest

    def _catch_up(self, compute_seconds: tuple[float, ...]) -> None:
        batch = None
        if self._begun is not None:
            start, longest = self._begun
            batch = Batch(longest, time.perf_counter() - start, compute_seconds)
        after = self._state()
        for entry in entries(self._before, after, batch):
            self._tell(entry)
        self._before, self._begun = after, None

    def _state(self) -> State:
        runtime, report = self._runtime, self._runtime.report
        rates = {device: rate for device, rate in self._rates().items() if rate != 1.0}
        happened = tuple(runtime.idle.events), tuple(runtime.in_flight.events)
        variants = dict(runtime.variants)
        return State(runtime.step, report.variant, report.rows, variants, rates, report.planned, *happened)

    def _tell(self, entry: Entry) -> None:
        for sink in self._sinks:
            sink.tell({**entry, "time": time.time()})
