"""What ranks do when in one step of each variant: recorded as the step runs, by each rank for itself.

Other ranks leave theirs in the job's store, where rank 0 finds them later. Nobody waits, and a rank that does not log
leaves none.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch.distributed as dist

from hetu_fx.base.torch_private import Store, store_of_world
from hetu_fx.report.updates import Entry
from hetu_fx.switching.runtime import Runtime

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
