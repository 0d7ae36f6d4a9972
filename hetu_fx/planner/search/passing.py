"""How long micro-batches take through a pipeline whose stages hand over beside their work.

With w_s seconds of a micro-batch in stage s of S, and h_s to hand it over to the next one, and as much back, one takes

    L = sum_s w_s + 2 sum_s h_s                                                                          (1)

Under 1F1B up to S - s micro-batches are under way behind the start of stage s, and each comes back there after

    R_s = sum_(t >= s) w_t + 2 sum_(t >= s) h_t                                                          (2)

so that m micro-batches take about

    L + (m - 1) max(max_s w_s, max_s (w_s + w_s+1 + 2 h_s) / 2, max_s R_s / (S - s) where S - s < m)     (3)

as two stages that follow each other wait for each other too: one more micro-batch is under way in front. Schedules that
are played (`price.pipeline`) were seen to differ from (3) by up to 6 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Schedule

_BACKWARD = 1 - 1 / FORWARD_AND_BACKWARD


def times(factor: float, line: Line) -> Line:
    """Return so many times a line."""
    return Line(factor * line.fixed, factor * line.slope)


@dataclass(frozen=True, slots=True)
class Passing:
    """What (3) asks for, as lines over the rows of a micro-batch.

    Attributes:
        whole: (1).
        beats: seconds of each further micro-batch at least, each with the number of micro-batches above which that is
            so; those that are nowhere above another are left out.
    """

    whole: Line
    beats: tuple[tuple[int, Line], ...]

    @classmethod
    def of(cls, work: Sequence[Line], edges: Sequence[Line], schedule: Schedule) -> Passing:
        """Return it for the work of stages and what they hand over, one way."""
        turns = list(_turns(work, edges))
        lines = [(0, line) for line in uppermost(work)]
        for asked in (_pairs(work, edges), turns[:-1]) if schedule == "1f1b" else ():
            found = [(number, times(1 / number, turn)) for number, turn in asked]
            lines += [one for one in found if not _is_below(one[1], lines)]
        return cls(turns[0][1], tuple(lines))

    def seconds(self, rows: int, micro_batches: int) -> float:
        """Return (3) of `rows` rows in up to `micro_batches` micro-batches, no more than there are rows."""
        if rows == 0:
            return 0.0
        count = min(micro_batches, rows)
        each = math.ceil(rows / count)
        return self.whole(each) + (count - 1) * self.beat(each, count)

    def beat(self, rows: int, micro_batches: float = math.inf) -> float:
        """Return how long each micro-batch of so many rows takes after the first, of so many of them."""
        return max([line(rows) for least, line in self.beats if least < micro_batches], default=0.0)


def _turns(work: Sequence[Line], edges: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Yield S - s and (2) of each stage, from the first to the last."""
    sent = [times(2.0, line) for line in (*edges, Line())][::-1]
    back = itertools.accumulate(one + other for one, other in zip(work[::-1], sent, strict=True))
    yield from reversed(list(enumerate(back, 1)))


def _pairs(work: Sequence[Line], edges: Sequence[Line]) -> list[tuple[int, Line]]:
    """Return what two stages that follow each other, and what they hand over, take together."""
    pairs = zip(itertools.pairwise(work), edges, strict=True)
    return [(2, line) for line in uppermost([one + other + times(2.0, sent) for (one, other), sent in pairs])]


def uppermost(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that may be above all others where rows are."""
    found: list[Line] = []
    for line in sorted(set(lines), key=lambda one: (-one.slope, -one.fixed)):
        if not found or line.fixed > found[-1].fixed:
            found.append(line)
    return found


def _is_below(line: Line, others: Sequence[tuple[int, Line]]) -> bool:
    return any(line.fixed <= other.fixed and line.slope <= other.slope for _, other in others)


def charged(work: Sequence[Line], edges: Sequence[Line]) -> tuple[Line, ...]:
    """Return what stages take if what they hand over, to the next one and back, counts with their work."""
    around = zip(work, [*edges, Line()], [Line(), *edges], strict=True)
    return tuple([own + there + back for own, there, back in around])


def backwards(work: Sequence[Line], edges: Sequence[Line]) -> tuple[Line, ...]:
    """Return from when on a pipeline is in the last backward of each stage, and of those before it, until it ends."""
    pairs = zip(work, [Line(), *edges], strict=True)
    return tuple(itertools.accumulate(times(_BACKWARD, own) + sent for own, sent in pairs))
