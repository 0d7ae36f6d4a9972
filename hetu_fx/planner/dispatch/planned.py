"""What planning ahead has decided for a batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.planner.dispatch.assignment import Assignment

Assignments = tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a batch.

    Attributes:
        assignments: the parts that run one after another.
        seconds: what they are expected to take together.
        planning_seconds: what making the plan took, wherever that was.
        waited_seconds: how long the step waited for it.
    """

    assignments: Assignments
    seconds: float
    planning_seconds: float
    waited_seconds: float
