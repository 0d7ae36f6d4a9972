"""Collectives among threads: calls of one group meet by their number, and the last one to come does what all came for.

Calls that do not fit together are refused as soon as the second one comes, on all ranks that come, with what each asked
for: processes would mix values, wait for ever, or be ended by gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetu_fx.errors import DivergedError


@dataclass(frozen=True, slots=True)
class Members:
    """A group: the ranks in it, in order, and a name that tells it from others of the same ranks."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a rank asks for: an operation, and what must be the same on all, in words."""

    name: str
    form: str = ""

    def __str__(self) -> str:
        return self.name + (f" of {self.form}" if self.form else "")


Act = Callable[[Mapping[int, Any]], None]
"""Does what all have come for, with what each has brought, by rank."""


@dataclass(slots=True, eq=False)
class ThreadMeeting:
    """One call of a group, while not all of its members have come."""

    group: Members
    number: int
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    brought: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False

    def come(self, rank: int, call: CollectiveCall, brings: Any, act: Act) -> None:
        """Take part; the last one acts. Raises DivergedError where another rank has come for something else."""
        self.calls[rank], self.brought[rank] = call, brings
        self.check()
        if len(self.calls) == len(self.group.ranks):
            act({rank: self.brought[rank] for rank in self.group.ranks})
            self.is_done = True

    def check(self) -> None:
        """Raise DivergedError where calls do not fit together."""
        if len(set(self.calls.values())) > 1:
            told = "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(self.calls.items()))
            raise DivergedError(f"unlike calls, number {self.number} of {self.group}:\n{told}")

    @property
    def is_over(self) -> bool:
        """Whether nobody has to wait any longer: all have come, or will not meet."""
        return self.is_done or len(set(self.calls.values())) > 1

    def __str__(self) -> str:
        call = next(iter(self.calls.values()))
        missing = [rank for rank in self.group.ranks if rank not in self.calls]
        return f"ranks {missing} in call {self.number} of {self.group}, {call}"


class ThreadMeetings:
    """The calls of all groups that have begun and are not done."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[Members, int]] = Counter()
        self._open: dict[tuple[Members, int], ThreadMeeting] = {}

    def come(self, group: Members, rank: int, call: CollectiveCall, brings: Any, act: Act) -> ThreadMeeting:
        """Make a rank's next call of a group."""
        self._calls[group, rank] += 1
        number = self._calls[group, rank]
        meeting = self._open.setdefault((group, number), ThreadMeeting(group, number))
        meeting.come(rank, call, brings, act)
        if meeting.is_done:
            del self._open[group, number]
        return meeting

    def left(self) -> list[str]:
        """Describe the calls that not all members have made."""
        return [f"{sorted(meeting.calls)} wait for {meeting}" for meeting in self._open.values()]
