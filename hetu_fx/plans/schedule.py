"""The order in which a stage runs the forwards and backwards of its micro-batches (Hetu v2 appendix A.2).

Pure data: each pipeline has its own number of stages and micro-batches; pipelines meet only in gradient sync.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, chain, count

from hetu_fx.plans.parts import DeviceDeal
from hetu_fx.plans.plan import Schedule, micro_batch_rows


class Phase(StrEnum):
    """Which part of a micro-batch's work; a backward may be cut in the gradients of inputs and of weights."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"

    @property
    def direction(self) -> int:
        """Return where what it makes goes: 1 to later stages, -1 to earlier ones, 0 nowhere."""
        return _DIRECTIONS[self]


_TICKS = {Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.INPUT_GRADIENT: 1, Phase.WEIGHT_GRADIENT: 1}
FORWARD, BACKWARD = 1, -1
_DIRECTIONS = {
    Phase.FORWARD: FORWARD,
    Phase.BACKWARD: BACKWARD,
    Phase.INPUT_GRADIENT: BACKWARD,
    Phase.WEIGHT_GRADIENT: 0,
}
"""To later parts of a pipeline, to earlier ones, or to none."""


PHASES: Mapping[Schedule, tuple[Phase, ...]] = {
    "1f1b": (Phase.FORWARD, Phase.BACKWARD),
    "gpipe": (Phase.FORWARD, Phase.BACKWARD),
    "zero-bubble": (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT, Phase.BACKWARD),
    "interleaved": (Phase.FORWARD, Phase.BACKWARD),
}
"""What may be done of a micro-batch, in order: all of it, but a backward whole or in its two halves."""

Passage = tuple[int, int, int]
"""What goes through a chunk of a stage: in which direction, which micro-batch, and the chunk."""

Sending = tuple[Passage, int]
"""What goes through a chunk of a stage, and another part of the pipeline that it may make something for."""


def cuts_backwards(schedule: Schedule) -> bool:
    """Tell whether the gradients of weights have a phase of their own."""
    return Phase.WEIGHT_GRADIENT in PHASES[schedule]


@dataclass(frozen=True, slots=True)
class Action:
    """A phase of one micro-batch on one stage, in one of the chunks of the model that the stage holds.

    Every part of the pipeline hands on to the next one; which part the chunk is says `plans.parts.DeviceDeal`.
    """

    phase: Phase
    micro_batch: int
    chunk: int = 0

    @property
    def passage(self) -> Passage:
        """Return what goes through: the same of a backward that is cut and of one that is not."""
        return self.phase.direction, self.micro_batch, self.chunk


Order = tuple[Action, ...]
"""The actions of one stage, as it runs them."""


def actions(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Return the actions of a stage in order.

    1F1B: min(n, S - s - 1) warm-up forwards, then forward-backward pairs, then the remaining backwards.
    GPipe: all forwards, then all backwards in the same order.
    Interleaved: 1F1B over several chunks per stage (`_interleaved`).
    Zero bubble: either 1F1B with some of its backwards cut, whose weights' gradients wait for an idle moment (`_cut`).
    """
    if chunks > 1:
        order = _interleaved(stage, num_stages, num_micro_batches, chunks)
    else:
        warm_up = num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage - 1)
        backwards = [Action(Phase.BACKWARD, m) for m in range(num_micro_batches)]
        order = _one_each(forwards(num_micro_batches), backwards, warm_up)
    if not cuts_backwards(schedule):
        return order
    in_round = max(_rounds(num_micro_batches, num_stages)) if chunks > 1 else num_stages
    return tuple(_cut(order, stage, chunks * in_round))


@lru_cache(maxsize=512)
def stage_orders(schedule: Schedule, num_stages: int, num_micro_batches: int, chunks: int = 1) -> tuple[Order, ...]:
    """Return the actions of every stage of a pipeline."""
    stages = range(num_stages)
    return tuple(actions(schedule, stage, num_stages, num_micro_batches, chunks) for stage in stages)


def _interleaved(stage: int, num_stages: int, num_micro_batches: int, chunks: int) -> Order:
    """Return the actions of 1F1B over chunks (Narayanan et al., Megatron-LM, SC 2021, section 2.2).

    Backwards go through the chunks the other way. A stage warms up with the forwards of a round through all chunks but
    the last, and two for each stage behind it: from then on one forward, one backward.
    """
    order = forwards(num_micro_batches, num_stages, chunks)
    backwards = [Action(Phase.BACKWARD, action.micro_batch, chunks - 1 - action.chunk) for action in order]
    warm_up = 2 * (num_stages - stage - 1) + (chunks - 1) * max(_rounds(num_micro_batches, num_stages))
    return _one_each(order, backwards, min(len(order), warm_up))


def _rounds(num_micro_batches: int, num_stages: int) -> tuple[int, ...]:
    """Return how many micro-batches go through one chunk after another together: as many as there are stages, or more.

    So Megatron's where their number is a multiple of that of the stages. In a round of fewer a stage would wait for
    what another can only make after it, but for one that is alone.
    """
    return micro_batch_rows(num_micro_batches, max(1, num_micro_batches // num_stages))


def _cut(order: Order, stage: int, num_cut: int) -> Iterator[Action]:
    """Yield the actions of ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2), of chunks too.

    The weights' gradients of stage s come s backwards late, when 1F1B on stage 0 keeps as many. Each stage but the
    first cuts `num_cut` backwards, as many as a round of micro-batches makes: its first s, which bring the first
    gradients to stage 0 sooner, and its last ones, which bring what else would be waited for at the end. Were all cut,
    as in the paper, equal stages would be done no sooner, but halves take longer than a whole, as the caches have lost
    by the second what the first has read.
    """
    num_backwards, numbers = len(order) // 2, count()
    wholes = range(stage, num_backwards - num_cut + stage) if stage else range(num_backwards)
    waiting: deque[Action] = deque()
    for action in order:
        if action.phase is Phase.FORWARD or next(numbers) in wholes:
            yield action
            continue
        yield replace(action, phase=Phase.INPUT_GRADIENT)
        waiting.append(replace(action, phase=Phase.WEIGHT_GRADIENT))
        if len(waiting) > stage:
            yield waiting.popleft()
    yield from waiting


def _one_each(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Return the first forwards, then one backward after each of the others, then the remaining backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return (*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :])


def forwards(num_micro_batches: int, num_stages: int = 1, chunks: int = 1) -> Order:
    """Return the actions of an evaluation, the same on every stage: forwards only, chunk by chunk in each round."""
    if chunks == 1:
        return tuple(Action(Phase.FORWARD, m) for m in range(num_micro_batches))
    sizes = _rounds(num_micro_batches, num_stages)
    rounds = [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    return tuple(Action(Phase.FORWARD, m, chunk) for own in rounds for chunk in range(chunks) for m in own)


@lru_cache(maxsize=512)
def departures(stages: tuple[Order, ...], stage: int) -> Mapping[Sending, int]:
    """Return for all that goes through a stage, and each part that it may make something for, when that leaves.

    It leaves in one call with what an action of its own stage waits for: the number of that action, or how many there
    are for a call after the last. On a clock on which a backward takes two ticks, as it about does, and all else one,
    that is the last call that is made no later than the receiver's, or else the first one. So nobody waits for ever
    where a rank's calls are carried out one after another, each only when all its messages have been called for at
    their other ends (NCCL, with messages larger than its buffers), whichever parts hand something to which: were a call
    the first on the clock that is never reached, the one before it would wait for another that is earlier on the clock
    and was never reached. Nor does what leaves a stage for another overtake what that waits for before, if in each call
    what is wanted first goes first (`arrivals`).
    """
    deal, (called, places), found = infer_deal(stages), _calls(stages), {}
    for (passage, other), place in arrivals(stages, stage).items():
        at = called[deal.stage(other)][place]
        found[passage, other] = max(places[stage][passage] + 1, bisect_right(called[stage], at) - 1)
    return found


@lru_cache(maxsize=512)
def at_once(stages: tuple[Order, ...], stage: int) -> Mapping[Sending, int]:
    """Return when things leave (`departures`) where nobody waits for a receiver: as soon as they are made.

    But what a stage waits for later does not overtake what it waits for before.
    """
    deal, (_, places) = infer_deal(stages), _calls(stages)
    found, least = {}, [0] * len(stages)
    wanted = arrivals(stages, stage).items()
    made = ((place, places[stage][passage], passage, other) for (passage, other), place in wanted)
    for _, number, passage, other in sorted(made, key=lambda one: one[:2]):
        call = max(number + 1, least[deal.stage(other)])
        found[passage, other] = least[deal.stage(other)] = call
    return found


@lru_cache(maxsize=512)
def arrivals(stages: tuple[Order, ...], stage: int) -> Mapping[Sending, int]:
    """Return for all that goes through a stage, and each part it may make something for, which action waits for that.

    By number, among those of the part's stage. What the stage has for its own parts goes nowhere.
    """
    deal, (_, places) = infer_deal(stages), _calls(stages)
    passages = (action.passage for action in stages[stage])
    pairs = ((passage, other) for passage in passages for other in _others(passage[0], passage, stage, deal))
    return {(passage, other): places[deal.stage(other)][_in_part(passage, other, deal)] for passage, other in pairs}


@lru_cache(maxsize=512)
def takings(stages: tuple[Order, ...], stage: int) -> Mapping[Sending, int]:
    """Return for all that goes through a stage, and each part it may make something for, when that is known as taken.

    It is where something arrives in the same chunk that the receiver has made after it took it: the number of the
    stage's own action that waits for the first such thing, or how many actions there are where nothing comes back.
    """
    found = {}
    answers = _answers(stages, stage)
    for (passage, other), place in arrivals(stages, stage).items():
        direction, _, chunk = passage
        numbers, made = answers[chunk, -direction, other]
        first = bisect_left(made, place)
        found[passage, other] = numbers[first] if first < len(numbers) else len(stages[stage])
    return found


def _answers(stages: tuple[Order, ...], stage: int) -> Mapping[tuple[int, int, int], tuple[list[int], list[int]]]:
    """Return what a stage's actions wait for, by (chunk, direction, other part): their numbers, and the makers'."""
    deal, (_, places) = infer_deal(stages), _calls(stages)
    found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, action in enumerate(stages[stage]):
        direction, _, chunk = passage = action.passage
        for other in _others(-direction, passage, stage, deal):
            numbers, made = found[chunk, direction, other]
            numbers.append(number)
            made.append(places[deal.stage(other)][_in_part(passage, other, deal)])
    return found


def _others(direction: int, passage: Passage, stage: int, deal: DeviceDeal) -> Iterator[int]:
    """Yield the parts of other stages that stand before the one that something goes through (-1), or after it (1)."""
    *_, chunk = passage
    part = deal.part(stage, chunk)
    found = {1: range(part + 1, deal.num_parts), -1: range(part), 0: range(0)}[direction]
    return (other for other in found if deal.stage(other) != stage)


def _in_part(passage: Passage, part: int, deal: DeviceDeal) -> Passage:
    """Return how the same goes through another part."""
    direction, micro_batch, _ = passage
    return direction, micro_batch, deal.chunk(part)


def infer_deal(stages: Sequence[Order]) -> DeviceDeal:
    """Return how parts are dealt out to stages that run these."""
    return DeviceDeal(len(stages), 1 + max((action.chunk for action in stages[0]), default=0))


@lru_cache(maxsize=64)
def _calls(stages: tuple[Order, ...]) -> tuple[list[list[int]], list[dict[Passage, int]]]:
    """Return when the calls of each stage are made: before each action and after the last; and actions' numbers."""
    called = [[0, *ended.values()] for ended in _ticks(stages)]
    return called, [{action.passage: place for place, action in enumerate(order)} for order in stages]


def _ticks(stages: Sequence[Order]) -> list[dict[Passage, int]]:
    """Return when each action of each stage has ended, in order, if it waits for that of the part before its own."""
    ticks: list[dict[Passage, int]] = [{} for _ in stages]
    free, left = [0] * len(stages), sum(map(len, stages))
    deal = infer_deal(stages)
    while left:
        for stage, (order, own) in enumerate(zip(stages, ticks, strict=True)):
            for action in order[len(own) :]:
                part = deal.part(stage, action.chunk)
                before = part - action.phase.direction
                waits = before != part and 0 <= before < deal.num_parts
                came = ticks[deal.stage(before)].get(_in_part(action.passage, before, deal)) if waits else 0
                if came is None:
                    break
                own[action.passage] = free[stage] = max(came, free[stage]) + _TICKS[action.phase]
        before_sweep, left = left, sum(map(len, stages)) - sum(map(len, ticks))
        assert left < before_sweep, "an order in which stages wait for each other"
    return ticks
