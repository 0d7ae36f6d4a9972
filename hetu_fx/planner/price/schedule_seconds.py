"""Seconds of a pipeline's schedule.

Every stage runs the entries of its schedule in order, after what a step takes on its hosts: each when the stage is free
and what it needs has come, the forward of the stage before or the backward of the stage behind. What an entry hands
over counts with it, as if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add

from hetu_fx.errors import StateError
from hetu_fx.planner.price.stage_seconds import StageCosts
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.parts import DeviceDeal
from hetu_fx.plans.plan import Schedule, micro_batch_rows
from hetu_fx.plans.schedule import BACKWARD, FORWARD, PHASES, Action, Order, Passage, Sending, departures, stage_orders

Columns = tuple[tuple[float, ...], ...]
"""Seconds by stage: of each micro-batch in one phase of the schedule (`PHASES`), then in the next.

Or of what each one's forward hands over, then of what its backward does. Here the stages are parts of a pipeline, of
which a group of devices may hold several (`plans.parts.DeviceDeal`).
"""

_HANDED = {FORWARD: 0, BACKWARD: 1}
"""Forwards hand over first, then backwards, whole or in halves."""

Seconds = Callable[[int], float]

Leaves = Callable[[tuple[Order, ...], int], Mapping[Sending, int]]
"""What says of a stage after how many of its entries something leaves."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An entry of a stage's schedule, and what it needs of another part.

    Attributes:
        stage, part: whose it is.
        action: what it does.
        source: the part that makes its input; -1 where its own has, or none does.
        made: the place, from 1, of the entry of the source's stage that makes it.
        after: how many entries of that stage have ended when it leaves.
    """

    stage: int
    part: int
    action: Action
    source: int = -1
    made: int = 0
    after: int = 0


@lru_cache(maxsize=512)
def turns(schedule: Schedule, deal: DeviceDeal, count: int, leaves: Leaves | None) -> tuple[Turn, ...]:
    """Return the entries of all stages for so many micro-batches, none before what it needs.

    `leaves` says for a stage after how many of its entries something leaves; None: when it is made.
    """
    stages = range(deal.num_stages)
    orders = stage_orders(schedule, deal.num_stages, count, deal.chunks)
    calls = [leaves(orders, stage) if leaves else {} for stage in stages]
    made: dict[tuple[int, Passage], int] = {}
    found, places = list[Turn](), [0] * deal.num_stages

    def needed(stage: int, action: Action) -> Turn | None:
        """Return the turn of the next entry of a stage; None while what it needs is not there."""
        part, direction = deal.part(stage, action.chunk), action.phase.direction
        source = part - direction
        if source == part or not 0 <= source < deal.num_parts:
            return Turn(stage, part, action)
        maker, passage = deal.stage(source), (direction, action.micro_batch, deal.chunk(source))
        place = made.get((maker, passage), 0)
        after = calls[maker].get((passage, part), place)
        return Turn(stage, part, action, source, place, after) if place and places[maker] >= after else None

    while len(found) < sum(map(len, orders)):
        before = len(found)
        for stage, order in enumerate(orders):
            while places[stage] < len(order) and (turn := needed(stage, order[places[stage]])) is not None:
                found.append(turn)
                places[stage] += 1
                action = turn.action
                made[stage, (action.phase.direction, action.micro_batch, action.chunk)] = places[stage]
        if len(found) == before:
            raise StateError(f"{schedule} on {deal.num_stages} stages stops after {len(found)} entries")
    return tuple(found)


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
    count, stages = len(sent[0]) // 2, range(deal.num_stages)
    busy = work if overlaps else [_together(*pair, schedule) for pair in zip(work, sent, strict=True)]
    places = {phase: place * count for place, phase in enumerate(PHASES[schedule])}
    free, last = [begins[deal.part(stage, 0)] for stage in stages], [0.0] * deal.num_stages
    ended: list[list[float]] = [[] for _ in stages]
    for turn in turns(schedule, deal, count, departures if overlaps else None):
        came, stage, micro_batch = 0.0, turn.stage, turn.action.micro_batch
        if turn.source >= 0:
            handed = micro_batch + _HANDED[turn.action.phase.direction] * count
            came = ended[deal.stage(turn.source)][turn.after - 1] + (sent[turn.source][handed] if overlaps else 0.0)
        last[stage] = busy[turn.part][micro_batch + places[turn.action.phase]]
        free[stage] = max(free[stage], came) + last[stage]
        ended[stage].append(free[stage])
    parts = [(deal.stage(part), deal.chunk(part)) for part in range(deal.num_parts)]
    # Gradients of other chunks than the first are there before, but leave when the stage is done.
    gradients = tuple([0.0 if chunk else last[stage] for stage, chunk in parts])
    return Finish(tuple([free[stage] for stage, _ in parts]), gradients)


def _together(work: Sequence[float], sent: Sequence[float], schedule: Schedule) -> list[float]:
    """Return the seconds of a part's phases, each with what it hands over."""
    count, found = len(sent) // 2, list[float]()
    for number, phase in enumerate(PHASES[schedule]):
        own = work[number * count : (number + 1) * count]
        handed = sent[_HANDED[phase.direction] * count :] if phase.direction else (0.0,) * count
        found += map(add, own, handed)
    return found
