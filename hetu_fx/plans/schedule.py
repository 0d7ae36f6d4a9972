"""The order in which a stage runs the forwards and backwards of its micro-batches (Hetu v2 appendix A.2).

Pure data: each pipeline has its own number of stages and micro-batches; pipelines meet only in gradient sync.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain

from hetu_fx.plans.plan import Schedule


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


_DIRECTIONS = {Phase.FORWARD: 1, Phase.BACKWARD: -1, Phase.INPUT_GRADIENT: -1, Phase.WEIGHT_GRADIENT: 0}


PHASES: Mapping[Schedule, tuple[Phase, ...]] = {
    "1f1b": (Phase.FORWARD, Phase.BACKWARD),
    "gpipe": (Phase.FORWARD, Phase.BACKWARD),
    "zero-bubble": (Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
}
"""What is done of each micro-batch, in order."""


def cuts_backwards(schedule: Schedule) -> bool:
    """Tell whether the gradients of weights have a phase of their own."""
    return Phase.WEIGHT_GRADIENT in PHASES[schedule]


@dataclass(frozen=True, slots=True)
class Action:
    """A phase of one micro-batch on one stage; on paper that may hold several chunks of the model."""

    phase: Phase
    micro_batch: int
    chunk: int = 0


Order = tuple[Action, ...]
"""The actions of one stage, as it runs them."""


def actions(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> Order:
    """Return the actions of a stage in order.

    1F1B: min(n, S - s - 1) warm-up forwards, then forward-backward pairs, then the remaining backwards.
    GPipe: all forwards, then all backwards in the same order.
    Zero bubble: 1F1B with its backwards cut; weights' gradients wait until there is nothing else to do (`_cut`).
    """
    warm_up = num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage - 1)
    backwards = [Action(Phase.BACKWARD, m) for m in range(num_micro_batches)]
    order = one_each(forwards(num_micro_batches), backwards, warm_up)
    return tuple(_cut(order, stage)) if schedule == "zero-bubble" else order


def _cut(order: Order, stage: int) -> Iterator[Action]:
    """Yield the actions of ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2).

    The weights' gradients of stage s come s micro-batches late, when 1F1B on stage 0 keeps as many.
    """
    waiting: deque[int] = deque()
    for action in order:
        if action.phase is Phase.FORWARD:
            yield action
            continue
        yield Action(Phase.INPUT_GRADIENT, action.micro_batch)
        waiting.append(action.micro_batch)
        if len(waiting) > stage:
            yield Action(Phase.WEIGHT_GRADIENT, waiting.popleft())
    yield from (Action(Phase.WEIGHT_GRADIENT, micro_batch) for micro_batch in waiting)


def one_each(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Return the first forwards, then one backward after each of the others, then the remaining backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return (*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :])


def forwards(num_micro_batches: int) -> Order:
    """Return the actions of an evaluation: forwards only."""
    return tuple(Action(Phase.FORWARD, m) for m in range(num_micro_batches))


@lru_cache(maxsize=512)
def departures(stages: tuple[Order, ...], stage: int) -> Mapping[tuple[Action, int], int]:
    """Return for each action of a stage, and each stage that it may make something for, when that leaves.

    It leaves in one call with what an action of its own stage waits for: the number of that action, or how many there
    are for a call after the last. On a clock on which every action takes one tick, that is the last call that is made
    no later than the receiver's, or else the first one. So nobody waits for ever where a rank's calls are carried out
    one after another, each only when all its messages have been called for at their other ends (NCCL, with messages
    larger than its buffers), whichever stages hand something to which: were a call the first on the clock that is never
    reached, the one before it would wait for another that is earlier on the clock and was never reached.
    """
    called, places = _calls(stages)
    found = {}
    for number, action in enumerate(stages[stage]):
        for other in _towards(action.phase.direction, stage, len(stages)):
            wanted = called[other][places[other][action]]
            found[action, other] = max(number + 1, bisect_right(called[stage], wanted) - 1)
    return found


@lru_cache(maxsize=512)
def takings(stages: tuple[Order, ...], stage: int) -> Mapping[tuple[Action, int], int]:
    """Return for each action of a stage, and each stage that it may make something for, when that is known to be taken.

    It is where something arrives that the receiver has made after it took it: the number of the stage's own action
    that waits for the first such thing, or how many actions there are where nothing comes back.
    """
    found = {}
    numbered = list(enumerate(stages[stage]))
    for direction in (1, -1):
        own = [(number, action) for number, action in numbered if action.phase.direction == direction]
        answers = [(number, action) for number, action in numbered if action.phase.direction == -direction]
        for other in _towards(direction, stage, len(stages)):
            at = {action: number for number, action in enumerate(stages[other])}
            made = [at[action] for _, action in answers]
            for _, action in own:
                first = bisect_left(made, at[action])
                found[action, other] = answers[first][0] if first < len(answers) else len(stages[stage])
    return found


def _towards(direction: int, stage: int, num_stages: int) -> range:
    """Return the stages that something may go to."""
    return {1: range(stage + 1, num_stages), -1: range(stage), 0: range(0)}[direction]


@lru_cache(maxsize=64)
def _calls(stages: tuple[Order, ...]) -> tuple[list[list[int]], list[dict[Action, int]]]:
    """Return when the calls of each stage are made, and the number of each of its actions."""
    called = [_called(order, started) for order, started in zip(stages, _ticks(stages), strict=True)]
    return called, [{action: place for place, action in enumerate(order)} for order in stages]


def _called(order: Order, started: Mapping[Action, int]) -> list[int]:
    """Return when the call before each action is made, and that after the last."""
    return [0, *(started[action] + 1 for action in order)]


def _ticks(stages: Sequence[Order]) -> list[dict[Action, int]]:
    """Return when each action of each stage starts, if each takes one tick and waits for that of the one before it."""
    ticks: list[dict[Action, int]] = [{} for _ in stages]
    free, left = [0] * len(stages), sum(map(len, stages))
    while left:
        for stage, (order, own) in enumerate(zip(stages, ticks, strict=True)):
            for action in order[len(own) :]:
                before = stage - action.phase.direction
                others = ticks[before] if 0 <= before < len(stages) and before != stage else {action: -1}
                if action not in others:
                    break
                own[action] = max(1 + others[action], free[stage])
                free[stage] = own[action] + 1
        before_sweep, left = left, sum(map(len, stages)) - sum(map(len, ticks))
        assert left < before_sweep, "an order in which stages wait for each other"
    return ticks
