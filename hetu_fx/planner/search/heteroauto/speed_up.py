"""H2's speed-up ratio: a mixed cluster against the sum of its homogeneous parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.problem import HeteroProblem
from hetu_fx.planner.search.heteroauto.result import HeteroResult
from hetu_fx.planner.search.heteroauto.search import search


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """The best plan of all chips, and the best of each kind alone with the same batch; None where that does not fit."""

    together: HeteroResult
    alone: Mapping[str, HeteroResult | None]

    @property
    def ratio(self) -> float:
        """Return tokens per second together over the sum of those alone; above 1 it is superlinear."""
        parts = math.fsum(1 / result.seconds for result in self.alone.values() if result is not None)
        return 1 / self.together.seconds / parts if parts else math.inf


def speed_up(problem: HeteroProblem) -> SpeedUp:
    """Plan for all kinds together and for each alone, which chooses its own number of replicas."""
    parts = {kind.name: replace(problem, kinds=(kind,), replicas=()) for kind in problem.kinds}
    return SpeedUp(search(problem), {name: _found(part) for name, part in parts.items()})


def _found(problem: HeteroProblem) -> HeteroResult | None:
    try:
        return search(problem)
    except PlanError:
        return None  # too large for this kind alone
