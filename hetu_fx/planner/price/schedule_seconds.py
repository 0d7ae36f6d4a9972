"""Seconds of a pipeline's schedule.

Every stage runs the entries of its schedule in order, after what a step takes on its hosts: each when the stage is free
and what it needs has come, the forward of the stage before or the backward of the stage behind. What an entry hands
over counts with it, as if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add

from hetu_fx.planner.price.stage_seconds import StageCosts
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.parts import DeviceDeal
from hetu_fx.plans.plan import Schedule, micro_batch_rows
from hetu_fx.plans.schedule import BACKWARD, FORWARD, PHASES, actions, departures, stage_orders

Columns = tuple[tuple[float, ...], ...]
"""Seconds by stage: of each micro-batch in one phase of the schedule (`PHASES`), then in the next.

Or of what each one's forward hands over, then of what its backward does. Here the stages are parts of a pipeline, of
which a group of devices may hold several (`plans.parts.DeviceDeal`).
"""

Entry = tuple[int, int, int, int]
"""The part that an entry of a stage's schedule is of, and its number among what the part works.

Then its number among what the part and its neighbours hand over (-1: it is none of that), and the part that it waits
for (-1: for none).
"""

_HANDED = {FORWARD: 0, BACKWARD: 1}
"""Forwards hand over first, then backwards, whole or in halves."""

Seconds = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Finish:
    """How a pipeline's schedule ends: when each part's stage is done, and how long its last gradients took."""

    ends: tuple[float, ...]
    last_gradients: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Return when all stages are done."""
        return max(self.ends)

    def done(self, part: int, share: float) -> float:
        """Return when a part has made a share of what its last micro-batch adds to gradients at the end."""
        return self.ends[part] - (1 - share) * self.last_gradients[part]


def finish(
    stages: Sequence[StageCosts],
    rows: int,
    micro_batches: int,
    schedule: Schedule,
    *,
    chunks: int = 1,
    beside: Sequence[int] = (),
) -> Finish:
    """Return how `rows` rows end in up to `micro_batches` micro-batches, larger ones first.

    Args:
        stages: what the pipeline's parts cost.
        rows, micro_batches, schedule: of it.
        chunks: how many of the parts each stage holds.
        beside: a stage goes on while what it hands over is under way, on links that as many pipelines share at once as
            this says of each edge between stages; left out: what is handed over counts with the work.
    """
    begins = tuple(max(stage.host) for stage in stages)
    if rows == 0:
        return Finish(begins, (0.0,) * len(stages))
    sizes, overlaps = micro_batch_rows(rows, min(micro_batches, rows)), len(beside) == len(stages) - 1 > 0
    crowds = (*beside, 1) if overlaps else (1,) * len(stages)
    work = tuple(_columns([partial(stage.seconds_of, phase) for phase in PHASES[schedule]], sizes) for stage in stages)
    sent = (
        _columns([_shared(stage.to_next, crowds[i]), _shared(stage.to_previous, crowds[i - 1])], sizes)
        for i, stage in enumerate(stages)
    )
    return _played(begins, work, tuple(sent), schedule, DeviceDeal.of(len(stages), chunks), overlaps)


def _shared(line: Line, count: int) -> Seconds:
    """Return the seconds of a message on links that so many share, by its rows."""
    return lambda rows: line.fixed + line.slope * count * rows


def _columns(phases: Sequence[Seconds], sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of one phase after another, those of micro-batches of one size worked out once."""
    known = [{size: seconds(size) for size in dict.fromkeys(sizes)} for seconds in phases]
    return tuple([of_size[size] for of_size in known for size in sizes])


@lru_cache(maxsize=4096)
def _played(
    begins: tuple[float, ...], work: Columns, sent: Columns, schedule: Schedule, deal: DeviceDeal, overlaps: bool
) -> Finish:
    board = _Board(begins, work, sent, schedule, deal, overlaps)
    while board.left:
        before = board.left
        for stage in range(deal.num_stages):
            board.go_on(stage)
        assert board.left < before, "an order in which stages wait for each other"
    places = [(deal.stage(part), deal.chunk(part)) for part in range(deal.num_parts)]
    # Gradients of other chunks than the first are there before, but leave when the stage is done.
    last = tuple([0.0 if chunk else board.seconds_of_last(stage) for stage, chunk in places])
    return Finish(tuple([board.free[stage] for stage, _ in places]), last)


class _Board:
    """How far stages have come: when each is free, and when what its entries make has come to others."""

    def __init__(
        self,
        begins: Sequence[float],
        work: Columns,
        sent: Columns,
        schedule: Schedule,
        deal: DeviceDeal,
        overlaps: bool,
    ) -> None:
        count, stages, self._deal = len(sent[0]) // 2, range(deal.num_stages), deal
        both = [_together(*pair, schedule) for pair in zip(work, sent, strict=True)]
        self._busy: Sequence[Sequence[float]] = work if overlaps else both
        self._under_way = sent if overlaps else [[0.0] * len(column) for column in sent]
        self._orders, self._after = _table(schedule, deal, count, overlaps)
        self._ended: list[list[float]] = [[] for _ in stages]
        self._places = [0] * deal.num_stages
        self.free, self.left = [begins[deal.part(stage, 0)] for stage in stages], sum(map(len, self._orders))

    def go_on(self, stage: int) -> None:
        """Do the next entries of a stage, as long as what they need has come."""
        order, ended = self._orders[stage], self._ended[stage]
        free, place = self.free[stage], self._places[stage]
        while place < len(order) and (came := self._came(order[place])) is not None:
            part, entry, *_ = order[place]
            free = max(free, came) + self._busy[part][entry]
            ended.append(free)
            place += 1
        self.left -= place - self._places[stage]
        self.free[stage], self._places[stage] = free, place

    def seconds_of_last(self, stage: int) -> float:
        """Return the seconds of a stage's last entry."""
        part, entry, *_ = self._orders[stage][-1]
        return self._busy[part][entry]

    def _came(self, needed: Entry) -> float | None:
        """Return when what an entry needs of another stage has come; None if it has not."""
        *_, handed, other = needed
        if other < 0:
            return 0.0
        after, ended = self._after[other][handed], self._ended[self._deal.stage(other)]
        return ended[after - 1] + self._under_way[other][handed] if len(ended) >= after else None


def _together(work: Sequence[float], sent: Sequence[float], schedule: Schedule) -> list[float]:
    """Return the seconds of a part's phases, each with what it hands over."""
    count, found = len(sent) // 2, list[float]()
    for number, phase in enumerate(PHASES[schedule]):
        own = work[number * count : (number + 1) * count]
        handed = sent[_HANDED[phase.direction] * count :] if phase.direction else (0.0,) * count
        found += map(add, own, handed)
    return found


@lru_cache(maxsize=512)
def _table(
    schedule: Schedule, deal: DeviceDeal, count: int, overlaps: bool
) -> tuple[list[list[Entry]], list[list[int]]]:
    """Return the entries of each stage in order, and when what each part makes for others is there.

    That is how many entries of its stage are done then; where what is handed over overlaps, when it leaves.
    """
    stages = range(deal.num_stages)
    entries = [list(_entries(schedule, stage, deal, count)) for stage in stages]
    after = [_done(entries[deal.stage(part)], part, count) for part in range(deal.num_parts)]
    orders = stage_orders(schedule, deal.num_stages, count, deal.chunks) if overlaps else ()
    for stage in stages if overlaps else ():
        for ((direction, micro_batch, chunk), other), call in departures(orders, stage).items():
            part = deal.part(stage, chunk)
            if other == part + direction:
                after[part][micro_batch + _HANDED[direction] * count] = call
    return entries, after


def _entries(schedule: Schedule, stage: int, deal: DeviceDeal, count: int) -> Iterator[Entry]:
    """Yield the entries of a stage in order."""
    places = {phase: place * count for place, phase in enumerate(PHASES[schedule])}
    for one in actions(schedule, stage, deal.num_stages, count, deal.chunks):
        part = deal.part(stage, one.chunk)
        other = part - one.phase.direction
        waits = other != part and 0 <= other < deal.num_parts
        handed = one.micro_batch + _HANDED[one.phase.direction] * count if one.phase.direction else -1
        yield part, one.micro_batch + places[one.phase], handed, other if waits else -1


def _done(entries: Sequence[Entry], part: int, count: int) -> list[int]:
    """Return how many entries of a part's stage are done when each of the part is that makes something for others."""
    places = {handed: place for place, (own, _, handed, _) in enumerate(entries, 1) if own == part}
    return [places[handed] for handed in range(2 * count)]
