"""Where every rank stands, and whether one has left the path that all must take together.

What the ranks have told goes in, whom to name comes out; and what this process waits for itself, in all threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto

from hetu_fx.comm_ops.wire.calls import last

WAY_OUT = (
    "Every process must make the same calls of the model, of its loss and of its parameters, in the same order. If one "
    "has work of its own to do for longer (it evaluates, it saves), give the others more patience: "
    "auto_parallelize(options=hetu_fx.Options(wait_seconds=600)), or HETU_FX_WAIT_SECONDS=600 in the environment"
)
_LEFT_ALONE = "hint: a rank that the others have left may still evaluate under torch.no_grad(), which it does alone"


@dataclass(frozen=True)
class RankStatus:
    """Where one rank stands.

    Attributes:
        beat: counts up, so that others see that it lives.
        call: of ours that it is in; "" in the user's own code.
        place: the user's line at which it is.
        waits_for: what it waits for; "" if it waits for nobody.
        seconds: for which it has waited, or been in the user's own code.
        last: its last call, "" if there was none.
        steps: calls of models so far.
        left: why its process has ended; None while it runs.
        table: of ranks whose communication it waits for: each model has its own.
    """

    beat: int = 0
    call: str = ""
    place: str = ""
    waits_for: str = ""
    seconds: float = 0.0
    last: str = ""
    steps: int = 0
    left: str | None = None
    table: str = ""

    @classmethod
    def read(cls, text: str) -> RankStatus:
        """Read what `write` wrote."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @property
    def is_busy(self) -> bool:
        """Whether it is at work in a call of ours."""
        return bool(self.call) and not self.waits_for

    def __str__(self) -> str:
        done = f"its last call was {self.last}, after {self.steps} calls of the model" if self.last else "no call yet"
        if self.left is not None:
            return f"has left the program{self.left and f' ({self.left})'}; {done}"
        if self.waits_for:
            return f"has waited {self.seconds:.1f} s for others ({self.waits_for}) at {self.place}"
        if self.call:
            return f"is at work at {self.place}"
        return f"has been in its own code for {self.seconds:.1f} s, now at {self.place}; {done}"


@dataclass
class Standings:
    """What this rank knows of the others: what they have told, and for how long they have told nothing new."""

    told: dict[int, RankStatus | None] = field(default_factory=dict)
    silent: dict[int, float] = field(default_factory=dict)

    def hear(self, told: Mapping[int, RankStatus | None], seconds: float) -> None:
        """Take in what each has told last; so much time has passed since the last call."""
        for rank, standing in told.items():
            before = self.told.get(rank)
            is_new = standing is not None and (before is None or standing.beat != before.beat)
            self.silent[rank] = 0.0 if is_new or rank not in self.told else self.silent[rank] + seconds
        self.told = dict(told)

    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Return the ranks that have told nothing new for so long."""
        return tuple(rank for rank, silent in self.silent.items() if silent >= seconds)

    def astray(self, own: RankStatus, bound: float) -> tuple[int, ...]:
        """Return the ranks that this one waits for in vain: they have left, or are not in its call for `bound` seconds.

        A rank that is at work in a call of ours will come. Where all wait, some in other calls or for
        another model's, those are named.
        """
        left = tuple(rank for rank, standing in self.told.items() if standing is not None and standing.left is not None)
        if left or own.seconds < bound:
            return left
        here = {r: s for r, s in self.told.items() if s is not None and self.silent[r] < bound / 2}
        if any(standing.is_busy for standing in here.values()):
            return ()
        away = [r for r, s in here.items() if not s.call and s.seconds >= bound]
        if gone := sorted({*away, *(self.told.keys() - here.keys())}):
            return tuple(gone)
        waiting = {r: s for r, s in here.items() if s.waits_for and s.seconds >= bound / 2}
        elsewhere = tuple(r for r, s in waiting.items() if (s.call, s.table) != (own.call, own.table))
        return elsewhere if waiting.keys() == self.told.keys() else ()

    def verdict(self, rank: int, own: RankStatus, astray: tuple[int, ...], bound: float) -> str:
        """Say who has left the common path, and where every rank stands, `rank` being this one."""
        named = ", ".join(f"rank {other}" for other in astray)
        title = f"{named} did not come to where rank {rank} waits, at {own.place or own.waits_for}"
        told = self.explain_ranks(title, rank, own, bound)
        have_left = [self.told[other] for other in astray]
        return f"{told}\n{_LEFT_ALONE}" if all(it is not None and it.left == "" for it in have_left) else told

    def explain_ranks(self, title: str, rank: int, own: RankStatus, bound: float) -> str:
        """Say where every rank stands below a title, `rank` being this one."""
        lines = {rank: str(own), **{other: self._spelled(other, bound) for other in self.told}}
        told = "\n".join(f"  rank {r}: {lines[r]}" for r in sorted(lines))
        return f"{title}:\n{told}\n{WAY_OUT}"

    def _spelled(self, rank: int, bound: float) -> str:
        standing, silent = self.told[rank], self.silent[rank]
        if standing is None:
            return "has not called hetu_fx.auto_parallelize"
        if standing.left is None and silent >= bound / 2:
            return f"has given no sign of life for {silent:.1f} s (is it stopped, or dead?); before, it {standing}"
        return str(standing)


CUT_OFF_SECONDS = 2.5
"""For so long the store may take to answer; with the pause before it is asked, it is said within 5 seconds."""


class Reach(Enum):
    """What is new about the way to the store: nothing, it is cut off, it is there again, or it is given up."""

    SAME = auto()
    LOST = auto()
    BACK = auto()
    OVER = auto()


@dataclass
class StoreSilence:
    """For how long the store has not answered, and whether that has been said."""

    seconds: float = 0.0
    is_said: bool = False

    def hear(self, is_asked: bool, passed: float, bound: float, *, is_needed: bool, is_waiting: bool) -> Reach:
        """Take in whether an answer is still awaited; so much time has passed since the last call.

        It is said where the answer is needed, and given up after `bound` seconds where this rank waits for others, who
        may have gone on without it by then.
        """
        self.seconds = self.seconds + passed if is_asked else 0.0
        if not is_asked and self.is_said:
            self.is_said = False
            return Reach.BACK
        if self.seconds > CUT_OFF_SECONDS and is_needed and not self.is_said:
            self.is_said = True
            return Reach.LOST
        return Reach.OVER if self.is_said and is_waiting and self.seconds > bound else Reach.SAME


class Wait:
    """A communication under way: what it is, since when (time.perf_counter), among whom, if they are watched.

    `table` is the name of the table that it goes by.

    This process says that it waits from when it is made to its `end`.
    """

    __slots__ = ("among", "start", "table", "what")

    def __init__(self, what: str, start: float, among: object | None = None, table: str = "") -> None:
        self.what, self.start, self.among, self.table = what, start, among, table
        last.waits.append(self)

    def end(self) -> None:
        """Say that it is over."""
        last.waits.remove(self)


def oldest_wait(among: object | None = None) -> Wait | None:
    """Return what this process has waited for longest, `among` (None: any); None if it does not communicate."""
    waits = [wait for wait in tuple(last.waits) if among is None or wait.among is among]
    return min(waits, key=lambda wait: wait.start, default=None)
