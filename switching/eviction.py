"""Eviction: what variants that do not run may keep, copies of parameters and graphs, is held to so many bytes.

Copies are made anew by one gather, graphs take seconds: so copies go first, and of both what was used longest ago.
Copies of parameters that have changed since are of no use to anyone and go at once. Every rank decides for itself, from
sizes that all have agreed on when they were new and from the order of use, which all know; so all decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.memory import Log
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.step.variant import Variant

Part = Literal["copies", "graphs"]


@dataclass(frozen=True, slots=True)
class IdleLayout:
    """What a compute layout that does not run keeps, in bytes, and the number of the last run that used it."""

    last_use: int
    copy_bytes: int
    graph_bytes: int

    def __post_init__(self) -> None:
        check_not_negative(StateError, "idle layout", copy_bytes=self.copy_bytes, graph_bytes=self.graph_bytes)


Eviction = tuple[int, Part]
"""What is to be evicted: a part of the layout of this index."""


def evictions(idle: Sequence[IdleLayout], limit_bytes: int) -> tuple[Eviction, ...]:
    """Return what is to be evicted, so that the rest takes no more than the limit, and no more than that needs."""
    order = sorted(range(len(idle)), key=lambda index: idle[index].last_use)
    sizes: list[tuple[Eviction, int]] = [((index, "copies"), idle[index].copy_bytes) for index in order]
    sizes += [((index, "graphs"), idle[index].graph_bytes) for index in order]
    left, found = sum(size for _, size in sizes), []
    for eviction, size in sizes:
        if left > limit_bytes and size:
            found.append(eviction)
            left -= size
    return tuple(found)


@dataclass(frozen=True, slots=True)
class GraphEvent:
    """Graphs of a variant were built or evicted, after so many training steps: their bytes and seconds on this rank."""

    event: Literal["built", "evicted"]
    step: int
    variant: str
    num_bytes: int
    seconds: float = 0.0


class IdleMemory:
    """Holds compute layouts that do not run to a limit.

    Attributes:
        limit_bytes: of one rank.
        num_bytes: what they kept when the last batch began, on the rank where each takes most.
        copies_dropped: how often copies that were still good have been evicted.
        events: what happened to graphs last, and how often something did.
    """

    def __init__(self, table: GroupTable, limit_bytes: int) -> None:
        self.table, self.limit_bytes = table, limit_bytes
        self.num_bytes = self.copies_dropped = 0
        self.events: Log[GraphEvent] = Log()
        self._uses = 0

    @contextmanager
    def use(self, variant: Variant, step: int) -> Iterator[Variant]:
        """Run a variant inside; what is made of its graphs is an event."""
        before, self._uses = variant.first_use.graph_seconds, self._uses + 1
        variant.compute.last_use = self._uses
        yield variant
        seconds = variant.first_use.graph_seconds - before
        if seconds:
            self.events.note(GraphEvent("built", step, variant.name, variant.compute.graph_bytes, seconds))

    def settle(self, variants: Mapping[str, Variant], running: str, step: int) -> None:
        """Evict what is too much of what variants keep that do not run; collective."""
        at_work = variants[running].compute
        names = {variant.compute: name for name, variant in variants.items() if variant.compute is not at_work}
        if not names:
            self.num_bytes = 0
            return
        computes = {name: compute for compute, name in names.items()}
        for compute in computes.values():
            if compute.has_stale_copies:
                compute.drop_copies()
        kept = {name: compute for name, compute in computes.items() if compute.has_copies or compute.has_graphs}
        self._agree([compute for compute in kept.values() if compute.sizes is None])
        order, idle = list(kept), [_idle(compute) for compute in kept.values()]
        for index, part in evictions(idle, self.limit_bytes):
            self._evict(order[index], kept[order[index]], part, step)
        self.num_bytes = sum(found.copy_bytes + found.graph_bytes for found in map(_idle, kept.values()))

    def _evict(self, name: str, compute: Compute, part: Part, step: int) -> None:
        if part == "copies":
            compute.drop_copies()
            self.copies_dropped += 1
        else:
            self.events.note(GraphEvent("evicted", step, name, compute.graph_bytes))
            compute.drop()

    def _agree(self, computes: Sequence[Compute]) -> None:
        """Agree on the sizes of what is new, each that of the rank where it is largest; collective."""
        if not computes:
            return
        told = all_gather_object(self.table, [(compute.copy_bytes, compute.graph_bytes) for compute in computes])
        for compute, sizes in zip(computes, zip(*told, strict=True), strict=True):
            copies, graphs = zip(*sizes, strict=True)
            compute.know_sizes(max(copies), max(graphs))


def _idle(compute: Compute) -> IdleLayout:
    copies, graphs = compute.sizes or (0, 0)
    return IdleLayout(compute.last_use, copies if compute.has_copies else 0, graphs)
