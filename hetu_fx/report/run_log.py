"""The log of a run: which variant ran each step, how long it took beside what was predicted, and what changed.

An entry is a mapping that JSON can say; a file has one a line (`JsonLines`). Kinds of entries (`event`):

    start       the format, the number of processes, the variants there are, for each its plan and the rates that this
                was made for; the devices and links (`cluster`, None if nobody knows), what a step costs (`profile`)
    plan        a variant was added: its name, its plan, and the rates that this was made for
    cluster     the first steps have corrected the devices' speeds
    health      the devices' straggling rates changed: those that are not 1
    memory      processes have had more memory than was told: the most that each has had (`hetu_fx.cluster.host`), 0 for
                those that do not log
    gathered    what a variant gathers in a step because no rule splits it, by op (`GatheredOp`), where that is anything
    switch      another variant than the step before runs
    built       graphs of a variant were made: their bytes, and the seconds that it took
    evicted     graphs of a variant that did not run were dropped, so that such variants keep to their bound
    moved       homes were changed: the bytes that came before training went on (of all processes), the seconds, and
                why, where homes have followed a plan
    arrived     what optimizers keep has come to those homes: its bytes, the seconds it was on its way beside the step,
                and for how many the step waited
    step        a training step: variant, longest sequence, rows per pipeline, seconds from its start to the next
                batch's, predicted seconds, the loss, and the compute seconds of every process; of sequences of mixed
                lengths also what planning it took (`planning_seconds`) and how long the step waited for that; where
                they are known its `tokens` and `flops`, and the rates that follow (`hetu_fx.report.rates`)
    evaluation  a batch without training: variant, rows, seconds and loss
    trace       what a rank did when in one step of a variant (`hetu_fx.report.run_log`), where a file is written
    lost        a call of the model has failed as a rank is dead, stuck or elsewhere: the error, as `why`

Steps are those of the optimizer: of batches whose gradients are added up (`micro_steps` of them) seconds and rows are
sums, and the loss is their mean. They are told when the next batch starts, for only then is known how long they took.
The loss is that which the step has returned to process 0, known by then without a message and without a wait; None
where the model returns none.

What ranks do when in one step of each variant: recorded as the step runs, by each rank for itself. Other ranks leave
theirs in the job's store, where rank 0 finds them later. Nobody waits, and a rank that does not log leaves none.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from hetu_fx.base.memory import Log
from hetu_fx.base.records import Document
from hetu_fx.base.torch_private import Store, store_of_world
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.host import peak_bytes
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import CommError
from hetu_fx.planner.dispatch.assignment import BatchPlan
from hetu_fx.planner.values.gathered_op import GATHERED_OP, GatheredOp
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.program.program import Program
from hetu_fx.report.rates import peak_flops, step_rates, training_flops
from hetu_fx.report.updates import Entry, Updates
from hetu_fx.switching.adapt.adaptation import Adaptation
from hetu_fx.switching.eviction import GraphEvent
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.migrate.in_flight import HomeEvent
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.compiled_plans import GraphVariant
from hetu_fx.switching.step.variant import Variant

_log = logging.getLogger("hetu_fx.report")

SETTLED = 3
"""The training step of a variant that is recorded: the first makes graphs, the second may make groups and states."""

Communication = tuple[str, float, float]
"""What it was, its start and its end by the host's clock."""

_MOST_SPANS = 2000
_POLLS = 16  # steps in which rank 0 looks for the spans of the others


class SpanRecorder:
    """Records the spans of one step of each variant; `begin` and `end` stand around each batch, on each rank that logs.

    A span is (name, kind, start, end), in seconds since the step's start, which all ranks come to together.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counts, self._recorded = Counter[str](), set[str]()
        self._heard: list[Communication] | None = None
        self._step, self._start = runtime.step, (0.0, runtime.clock.now())
        self._awaited: dict[str, dict[str, Any]] = {}
        self._polls = 0
        is_joined = runtime.table.size > 1 and dist.is_initialized()
        self._store: Store | None = store_of_world() if is_joined else None

    def begin(self) -> None:
        """Record the batch that begins, unless a step of the variant that ran last is recorded already."""
        runtime = self._runtime
        self._step, self._start = runtime.step, (perf_counter(), runtime.clock.now())
        if runtime.report.variant not in self._recorded:
            heard = self._heard = list[Communication]()
            runtime.listen_to_communication(lambda *event: heard.append(event), self)

    def close(self) -> None:
        """Record no more."""
        self._heard = None
        self._runtime.listen_to_communication(None, self)

    def end(self, step: int) -> Iterator[Entry]:
        """End the batch before; on rank 0 yield an entry for each rank whose spans are there, under this `step`."""
        heard, name = self._heard, self._runtime.report.variant
        self.close()
        self._counts[name] += self._runtime.step == self._step + 1
        try:
            if heard is not None and name not in self._recorded and self._counts[name] >= SETTLED:
                self._recorded.add(name)
                yield from self._told({"event": "trace", "step": step, "variant": name}, heard)
            yield from self._arrived()
        except RuntimeError as error:  # with the rank that served it
            _log.info("the store is gone, the spans of other ranks are left out: %s", error)
            self._store = None

    def _told(self, entry: dict[str, Any], heard: list[Communication]) -> Iterator[Entry]:
        """Yield this rank's entry on rank 0, which waits for those of the others; leave it in the store on others."""
        table, seconds = self._runtime.table, perf_counter() - self._start[0]
        keys = {rank: f"hetu_fx/spans/{table.number}/{self._step}/{rank}" for rank in range(table.size)}
        spans = sorted(self._spans(heard), key=lambda span: span[2])[:_MOST_SPANS]
        if table.rank == 0:
            self._awaited |= {keys[rank]: {**entry, "rank": rank, "seconds": seconds} for rank in range(1, table.size)}
            self._polls = _POLLS
            yield {**entry, "rank": 0, "seconds": seconds, "spans": spans}
        elif self._store is not None:
            self._store.set(keys[table.rank], json.dumps(spans))

    def _spans(self, heard: list[Communication]) -> Iterator[tuple[str, str, float, float]]:
        (host, device), clock = self._start, self._runtime.clock
        for one in self._runtime.report.timer.spans:
            start, end = (max(0.0, clock.seconds(device, moment)) for moment in one)
            yield "compute", "compute", start, max(start, end)
        for what, start, end in heard:
            kind = what if what == "group creation" else "communication"
            yield what, kind, max(0.0, start - host), max(0.0, end - host)

    def _arrived(self) -> Iterator[Entry]:
        """Yield the entries of other ranks that have come to the store."""
        if self._store is None or not self._awaited:
            return
        for key in [key for key in self._awaited if self._store.check([key])]:
            yield {**self._awaited.pop(key), "spans": json.loads(self._store.get(key))}
        self._polls -= 1
        if self._polls <= 0:
            self._awaited.clear()


FORMAT = "hetu_fx.log/2"

LOOK_SECONDS = 1.0
"""A process looks at its memory as often as this at most."""

TOLD_GROWTH = 1.01
"""Memory is told again when a process has had so many times what was told."""


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
        graphs: what has happened to graphs since the state before.
        homes: what has happened to homes since then.
        cluster: the devices and links; None if nobody knows.
        peak_bytes: of each process, as told.
        gathered: what variants gather because no rule splits it, of those that have trained.
    """

    step: int = 0
    variant: str = ""
    rows: tuple[int, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    rates: Mapping[int, float] = field(default_factory=dict)
    planned: BatchPlan | None = None
    graphs: Sequence[GraphEvent] = ()
    homes: Sequence[HomeEvent] = ()
    cluster: Cluster | None = None
    peak_bytes: tuple[int, ...] = ()
    gathered: Mapping[str, tuple[GatheredOp, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is known of a batch once it is over; seconds by process are empty if these have not met since.

    `tokens` are those of all rows, padding included, and `flops` those of its products; None where they are not known.
    """

    longest: int
    seconds: float
    compute_seconds: tuple[float, ...] = ()
    loss: float | None = None
    host_seconds: tuple[float, ...] = ()
    tokens: int | None = None
    flops: float | None = None


def entries(before: State, after: State, batch: Batch | None) -> Iterator[Entry]:
    """Yield what happened between two states, of which the later one has run `batch` (None: nothing yet)."""
    yield from map(_graph_entry, after.graphs)
    if batch is not None:
        if before.variant not in ("", after.variant):
            yield {"event": "switch", "step": after.step, "from": before.variant, "to": after.variant}
        yield _batch_entry(before, after, batch)
    yield from map(_home_entry, after.homes)
    for name in after.variants:
        if name not in before.variants:
            yield {"event": "plan", "step": after.step, **_plan(name, after.variants[name])}
    if before.cluster != after.cluster:
        yield {"event": "cluster", "step": after.step, "cluster": _json(after.cluster)}
    if before.rates != after.rates:
        rates = {str(device): rate for device, rate in after.rates.items()}
        yield {"event": "health", "step": after.step, "rates": rates}
    for name, found in after.gathered.items():
        if found != before.gathered.get(name, ()):
            ops = [GATHERED_OP.write(one) for one in found]
            yield {"event": "gathered", "step": after.step, "variant": name, "ops": ops}
    if before.peak_bytes != after.peak_bytes:
        yield {"event": "memory", "step": after.step, "peak_bytes": list(after.peak_bytes)}


def _plan(name: str, variant: Variant) -> Entry:
    rates = {str(device): rate for device, rate in variant.planned_rates.items()}
    return {"name": name, "plan": variant.plan.to_json(), "rates": rates}


def _json(document: Document | None) -> Any:
    return None if document is None else document.to_json()


def grown(told: tuple[int, ...], found: Sequence[float]) -> tuple[int, ...]:
    """Return the peaks to tell: those of `told`, or the larger of both where a process has had clearly more."""
    if found and len(found) != len(told):
        return tuple(map(int, found))
    if not found or all(new <= old * TOLD_GROWTH for old, new in zip(told, found, strict=True)):
        return told
    return tuple(max(old, int(new)) for old, new in zip(told, found, strict=True))


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
    ran |= {"loss": batch.loss}
    if after.step == before.step:
        return {"event": "evaluation", "step": after.step, **ran}
    planned = after.planned
    predicted = after.variants[after.variant].predicted_seconds if planned is None else planned.seconds
    times: dict[str, Any] = {"predicted_seconds": predicted or None, "compute_seconds": list(batch.compute_seconds)}
    times["host_seconds"] = list(batch.host_seconds)
    times |= {} if batch.tokens is None else {"tokens": batch.tokens}
    times |= {} if batch.flops is None else {"flops": batch.flops}
    if planned is not None:
        times |= {"planning_seconds": planned.planning_seconds, "waited_seconds": planned.waited_seconds}
    return {"event": "step", "step": after.step, **ran, **times}


def gathered_ops(name: str, runtime: Runtime, adaptation: Adaptation) -> tuple[GatheredOp, ...]:
    """Return what a variant gathers because no rule splits it; nothing of a module that runs as it is."""
    program, variant = _trained_program(runtime), runtime.variants[name]
    if program is None or not isinstance(variant, GraphVariant):
        return ()
    return variant.gathered(program, adaptation.costs.rows, adaptation.cluster)


def _trained_program(runtime: Runtime) -> Program | None:
    """Return the graph that was last asked for in training; None of a module that runs as it is."""
    return runtime.execution.program if isinstance(runtime.execution, GraphExecution) else None


def _count(variant: Variant, rows: Sequence[int]) -> int:
    """Return how many rows a step has had, from those of its pipelines, which may each have had all."""
    return max(rows, default=0) if variant.repeats_rows else sum(rows)


class RunLog(AbstractContextManager["RunLog"]):
    """Tells its sinks what a run does, from now until it is closed; a context manager.

    Args:
        runtime: what runs.
        adaptation: knows the devices, and what a step costs.
        sinks: what takes the entries, each with the `time` it was told at (seconds since 1970). None: this process
            tells nothing.
        traces: record what this rank does in one step of each variant, for the log of rank 0.
    """

    def __init__(
        self, runtime: Runtime, adaptation: Adaptation, sinks: Sequence[Sink], *, traces: bool = False
    ) -> None:
        self._runtime, self._adaptation, self._sinks = runtime, adaptation, sinks
        self._before = State(
            step=runtime.step,
            variants=dict(runtime.variants),
            cluster=adaptation.cluster,
        )
        self._logs: tuple[Log[Any], ...] = runtime.idle.events, runtime.in_flight.events
        self._counts = [log.count for log in self._logs]
        self._begun: tuple[float, int] | None = None
        self._peak_bytes, self._looked = 0, -math.inf
        self._gathered_of: dict[str, tuple[object, ...]] = {}
        self._updates = Updates(runtime.homes.values(), runtime.step) if sinks else None
        self._recorder = SpanRecorder(runtime) if traces else None
        self._is_lost = False
        runtime.listen_to_losses(self._lose)
        if sinks:
            self._tell(self._start())

    def _start(self) -> Entry:
        names, known = list(self._before.variants), self._before.variants.items()
        told = {"event": "start", "format": FORMAT, "processes": self._runtime.table.size, "variants": names}
        profile = Profile(self._adaptation.costs, source="estimate")
        figures = {"cluster": _json(self._before.cluster), "profile": _json(profile)}
        return told | {"plans": [_plan(*pair) for pair in known]} | figures

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CommError):
            self._lose(error)
        self.close()

    def _lose(self, error: CommError) -> None:
        """Tell once that a rank is lost."""
        if not self._is_lost and self._updates is not None:
            self._tell({"event": "lost", "step": self._updates.number, "why": str(error)})
        self._is_lost = True

    def close(self) -> None:
        """Tell of the last batch, and of nothing more."""
        if self._runtime.unwatch(self):
            self._runtime.stop_listening(self._lose)
            self._catch_up(StepFacts(), self._before.peak_bytes)
            if not self._is_lost:  # the store may be gone, too
                self._tell_spans()
            if self._updates is not None:
                for entry in self._updates.rest():
                    self._tell(entry)
                self._updates.close()
            if self._recorder is not None:
                self._recorder.close()
            for sink in self._sinks:
                sink.close()

    def tell(self) -> dict[str, float]:
        """Say how much memory this process has had."""
        now = time.perf_counter()
        if now - self._looked >= LOOK_SECONDS:
            self._peak_bytes, self._looked = peak_bytes(next(self._runtime.model.parameters()).device), now
        return {"peak_bytes": self._peak_bytes}

    def observe(self, facts: StepFacts) -> None:
        """Tell of the batch before, which ends as another one begins."""
        self._catch_up(facts, grown(self._before.peak_bytes, facts.peak_bytes))
        self._begun = time.perf_counter(), facts.longest
        self._tell_spans()
        if self._recorder is not None:
            self._recorder.begin()

    def _tell_spans(self) -> None:
        number = self._before.step if self._updates is None else self._updates.number
        for entry in () if self._recorder is None else self._recorder.end(number):
            self._tell(entry)

    def _catch_up(self, facts: StepFacts, peaks: tuple[int, ...]) -> None:
        if self._updates is None:
            return
        batch = None
        if self._begun is not None:
            start, longest = self._begun
            seconds, loss = time.perf_counter() - start, self._runtime.report.loss.number
            work = self._work(longest)
            batch = Batch(longest, seconds, facts.compute_seconds, loss, facts.host_seconds, *work)
        after = replace(self._state(), peak_bytes=peaks)
        for entry in self._updates.joined(entries(self._before, after, batch)):
            self._tell(entry)
        self._before, self._begun = after, None

    def _work(self, longest: int) -> tuple[int | None, float | None]:
        """Return the tokens and the FLOPs of the batch that ran last, where its rows are as they were counted."""
        known, report = self._adaptation, self._runtime.report
        if known.length is None or report.planned is not None:
            return None, None
        rows = sum(report.rows)  # a captured graph has each row once
        tokens = rows * longest if longest and known.costs.has_sequence else None
        trains_all = all(parameter.requires_grad for parameter in self._runtime.homes.values())
        return tokens, training_flops(known.costs, rows) if longest == known.length and trains_all else None

    def _state(self) -> State:
        runtime, report = self._runtime, self._runtime.report
        rates = {device: rate for device, rate in self._adaptation.rates.items() if rate != 1.0}
        graphs, homes = (log.since(count) for log, count in zip(self._logs, self._counts, strict=True))
        self._counts = [count + len(new) for count, new in zip(self._counts, (graphs, homes), strict=True)]
        variants = dict(runtime.variants)
        cluster = self._adaptation.cluster
        ran = runtime.step, report.variant, report.rows, variants, rates, report.planned
        return State(*ran, graphs, homes, cluster, gathered=self._gathered(report.variant))

    def _gathered(self, name: str) -> Mapping[str, tuple[GatheredOp, ...]]:
        """Return what variants gather; of the one that ran last anew, where its plan, graph or devices have changed."""
        program, variant = _trained_program(self._runtime), self._runtime.variants.get(name)
        if program is None or variant is None:
            return self._before.gathered
        asked = variant.plan, program.fingerprint, self._adaptation.cluster
        if self._gathered_of.get(name) == asked:
            return self._before.gathered
        self._gathered_of[name] = asked
        return {**self._before.gathered, name: gathered_ops(name, self._runtime, self._adaptation)}

    def _tell(self, entry: Entry) -> None:
        if entry["event"] == "step":
            variant = self._runtime.variants[entry["variant"]]
            peak = peak_flops(self._adaptation.cluster, variant.plan.devices)
            entry = {**entry, **step_rates(entry, _count(variant, entry["rows"]), peak)}
        for sink in self._sinks:
            sink.tell({**entry, "time": time.time()})
