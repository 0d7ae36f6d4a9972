"""What torch's allocator has handed out and not got back, by its own profiler: the most at once, and where that stands.

What gloo's threads free it does not see: where they happen to be the last to let go of a message, that seems to be held
for ever. So a case is measured several times over, and the least counts. Resident memory would not do: the C library
keeps freed memory, Python and libraries take more than small models, and pages that nobody has touched do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "the step that is measured"


def recording() -> profile:
    """Record all that is allocated inside, on the host."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def measured_step() -> AbstractContextManager[Any]:
    """Mark the step whose peak counts."""
    return record_function(STEP)


@dataclass(frozen=True, slots=True)
class _Change:
    """A piece of memory that was handed out, or (fewer than no bytes) given back."""

    when: int
    place: int
    size: int


@dataclass(frozen=True)
class Recorded:
    """What was recorded: changes in order, and from when to when each mark in the step lasted (nanoseconds)."""

    changes: Sequence[_Change]
    marks: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, record: profile) -> Recorded:
        """Read a finished record."""
        assert record.profiler is not None
        assert record.profiler.kineto_results is not None
        events = list(_walk(record.profiler.kineto_results.experimental_event_tree()))
        memory = [event for event in events if event.tag.name == "Allocation"]
        changes = [_Change(e.start_time_ns, e.extra_fields.ptr, e.extra_fields.alloc_size) for e in memory]
        marks = [(e.name, (e.start_time_ns, e.end_time_ns)) for e in events if e.tag.name == "TorchOp"]
        start, end = dict(marks)[STEP]
        within = {name: (first, last) for name, (first, last) in marks if start <= first and last <= end}
        return cls(sorted(changes, key=lambda change: change.when), within)

    @property
    def peak_bytes(self) -> int:
        """The most that was out at once from the mark of the step on."""
        return max((total, number) for total, number in self._totals())[0]

    def _totals(self) -> Iterator[tuple[int, int]]:
        """Yield what is out after each change since the mark, and the number of the change."""
        start = self.marks[STEP][0]
        totals = accumulate(change.size for change in self.changes)
        return ((total, i) for i, total in enumerate(totals) if self.changes[i].when >= start)

    def at_peak(self, known: Mapping[str, Iterable[Tensor]], phases: Sequence[str]) -> dict[str, int]:
        """Return what is out at the peak, in bytes by what it is; it adds up to the peak.

        Args:
            known: tensors that are there at the end, by what they are; what is in several counts as the first.
            phases: marks within the step. Other memory is told by the one in which it was handed out, if by any.
        """
        _, last = max(self._totals())
        out: dict[int, _Change] = {}
        for change in self.changes[: last + 1]:
            if change.size < 0:
                out.pop(change.place, None)
            else:
                out[change.place] = change
        names = {t.untyped_storage().data_ptr(): name for name, tensors in reversed(known.items()) for t in tensors}
        found = {**dict.fromkeys(known, 0), **{f"other, from {phase}": 0 for phase in ("before", *phases)}}
        for change in out.values():
            found[names.get(change.place) or f"other, from {self._phase(change.when, phases)}"] += change.size
        return found | {"given back by other threads": self.peak_bytes - sum(found.values())}

    def _phase(self, when: int, phases: Sequence[str]) -> str:
        return next((phase for phase in phases if self.marks[phase][0] <= when <= self.marks[phase][1]), "before")


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
