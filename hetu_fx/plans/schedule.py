"""The order in which a stage runs the forwards and backwards of its micro-batches (Hetu v2 appendix A.2).

Pure data: each pipeline has its own number of stages and micro-batches; pipelines meet only in gradient sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetu_fx.plans.plan import Schedule


class Phase(StrEnum):
    """Which half of a micro-batch's work."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Action:
    """One half of one micro-batch on one stage."""

    phase: Phase
    micro_batch: int


def actions(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a stage in order.

    1F1B: min(n, S - s - 1) warm-up forwards, then forward-backward pairs, then the remaining backwards.
    GPipe: all forwards, then all backwards in the same order.
    """
    warm_up = min(num_micro_batches, num_stages - stage - 1) if schedule == "1f1b" else num_micro_batches
    order = [Action(Phase.FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, num_micro_batches):
        order += [Action(Phase.FORWARD, m), Action(Phase.BACKWARD, m - warm_up)]
    first_left = num_micro_batches - warm_up
    return (*order, *(Action(Phase.BACKWARD, m) for m in range(first_left, num_micro_batches)))


def forwards(num_micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of an evaluation: forwards only."""
    return tuple(Action(Phase.FORWARD, m) for m in range(num_micro_batches))
