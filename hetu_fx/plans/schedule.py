"""The order in which a stage runs the forwards and backwards of its micro-batches (Hetu v2 appendix A.2).

Pure data: each pipeline has its own number of stages and micro-batches; pipelines meet only in gradient sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from hetu_fx.plans.plan import Schedule


class Phase(StrEnum):
    """Which part of a micro-batch's work; on paper a backward may be cut in the gradients of inputs and of weights."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """A phase of one micro-batch on one stage; on paper that may hold several chunks of the model."""

    phase: Phase
    micro_batch: int
    chunk: int = 0


def actions(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a stage in order.

    1F1B: min(n, S - s - 1) warm-up forwards, then forward-backward pairs, then the remaining backwards.
    GPipe: all forwards, then all backwards in the same order.
    """
    warm_up = min(num_micro_batches, num_stages - stage - 1) if schedule == "1f1b" else num_micro_batches
    backwards = [Action(Phase.BACKWARD, m) for m in range(num_micro_batches)]
    return one_each(forwards(num_micro_batches), backwards, warm_up)


def one_each(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Return the first forwards, then one backward after each of the others, then the remaining backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return (*forwards[:warm_up], *chain.from_iterable(pairs), *backwards[len(forwards) - warm_up :])


def forwards(num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of an evaluation: forwards only."""
    return tuple(Action(Phase.FORWARD, m) for m in range(num_micro_batches))
