"""Plans what runs a batch of sequences, ahead of the step in a thread of its own where the batch is known by then.

A plan follows from the lengths alone, so every rank makes the same one without asking. A planner is told of lengths to
come; the step takes the plan that was made for its own, or makes it on the spot.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from hetu_fx.planner.dispatch.assignment import Assignments, EligibleVariant, Planned, Request
from hetu_fx.planner.dispatch.policies import Hydraulis, SequencePolicy

_KEPT = 64  # plans that were made and not taken yet


@dataclass
class PlanningStats:
    """What planning has taken.

    Attributes:
        batches: how many batches have been planned for and run.
        seconds: how long their planning took, wherever it was done.
        waited_seconds: how long steps waited for it.
        predicted_seconds: what the last batch was expected to take.
    """

    batches: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    predicted_seconds: float = 0.0

    def add(self, planned: Planned) -> None:
        """Count a plan."""
        self.batches += 1
        self.seconds += planned.planning_seconds
        self.waited_seconds += planned.waited_seconds
        self.predicted_seconds = planned.seconds

    @property
    def hidden_share(self) -> float:
        """Return the share of the planning that no step waited for; 0 where nothing was planned."""
        return max(0.0, 1 - self.waited_seconds / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class _Asked:
    """All that a plan follows from."""

    policy: SequencePolicy
    candidates: tuple[EligibleVariant, ...]
    request: Request

    def plan(self) -> tuple[Assignments, float]:
        """Return the plan, and the seconds that it took."""
        start = perf_counter()
        return self.policy(self.candidates, self.request), perf_counter() - start


class SequencePlanner:
    """Plans batches of sequences; `policy` can be replaced, on all ranks alike."""

    def __init__(self) -> None:
        self.policy: SequencePolicy = Hydraulis()
        self.stats = PlanningStats()
        self._made: OrderedDict[_Asked, Future[tuple[Assignments, float]]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def ahead(self, candidates: Sequence[EligibleVariant], request: Request) -> None:
        """Begin to plan for a batch that is to come."""
        asked = _Asked(self.policy, tuple(candidates), request)
        if asked in self._made:
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "hetu_fx planning")
        self._made[asked] = self._thread.submit(asked.plan)
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)[1].cancel()

    def take(self, candidates: Sequence[EligibleVariant], request: Request) -> Planned:
        """Return what runs a batch now.

        Raises:
            BatchError: no variant takes its longest sequence.
        """
        asked = _Asked(self.policy, tuple(candidates), request)
        start = perf_counter()
        under_way = self._made.pop(asked, None)
        found, seconds = asked.plan() if under_way is None else under_way.result()
        planned = Planned(found, math.fsum(one.seconds for one in found), seconds, perf_counter() - start)
        self.stats.add(planned)
        return planned
