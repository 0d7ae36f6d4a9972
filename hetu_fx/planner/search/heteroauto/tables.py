"""What stages cost, for all numbers of layers and places in a pipeline at once.

Rows are places counted from the end: a stage in row q is followed by q - 1 others, which says how many micro-batches
it has in flight. Columns are layers. A stage whose activations fit keeps them, as computing them again is never
faster; one where only inputs fit recomputes; else it takes infinitely long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetu_fx.planner.search.heteroauto.cost import (
    Groups,
    HeteroStage,
    Numbers,
    activation_bytes,
    edge_of,
    hand_over_seconds,
    held_bytes,
    state_bytes,
    update_seconds,
    work_seconds,
)
from hetu_fx.planner.search.heteroauto.problem import EndCosts, HeteroProblem
from hetu_fx.planner.values.device_memory import in_flight


@dataclass(frozen=True, slots=True)
class Costs:
    """By place and layers, the two sides of (1) in `cost`.

    `share` is what a stage adds to the bubble's sum, `bound` the rest of the step if it is the slowest. Both grow with
    the layers.
    """

    share: Numbers
    bound: Numbers

    def within(self, limit: float) -> Numbers:
        """Return the shares, infinite for stages whose bound is above the limit."""
        return np.where(self.bound <= limit, self.share, np.inf)


@dataclass(frozen=True, slots=True)
class StageGroups:
    """Groups that hold a stage, those of the stage behind (None at the end), and if it is the pipeline's first."""

    groups: Groups
    behind: Groups | None
    is_first: bool = False


class Tables:
    """Costs of stages for one number of replicas and up to so many stages; remembers what it worked out."""

    def __init__(self, problem: HeteroProblem, replicas: int, most_stages: int) -> None:
        self.problem, self.replicas = problem, replicas
        self._count = problem.num_micro_batches // replicas
        self._layers = np.arange(problem.num_layers + 1, dtype=np.float64)[None, :]
        flying = [in_flight(problem.schedule, 0, row, self._count) for row in range(1, most_stages + 1)]
        self._flying = np.array([0.0, *flying])[:, None]
        self._costs: dict[StageGroups, Costs] = {}
        self._work: dict[tuple[Groups, EndCosts], Numbers] = {}
        self._least: dict[Groups, Numbers] = {}

    def costs(self, place: StageGroups) -> Costs:
        """Return the costs of stages at a place."""
        if place not in self._costs:
            edge = edge_of(self.problem, place.is_first, place.behind is None)
            behind = 0.0 if place.behind is None else hand_over_seconds(self.problem, place.groups, place.behind)
            self._costs[place] = self._priced(place.groups, edge, behind)
        return self._costs[place]

    def least_bounds(self, groups: Groups) -> Numbers:
        """Return bounds that no place is below: nothing stands before or after, and nothing is handed over."""
        if groups not in self._least:
            self._least[groups] = self._priced(groups, EndCosts(), 0.0).bound
        return self._least[groups]

    def least_share(self, groups: Groups) -> float:
        """Return what a layer adds to the bubble's sum at least."""
        return self.problem.bubble * work_seconds(groups, 1.0, EndCosts(), recompute=False)

    def stage(self, place: StageGroups, row: int, layers: int) -> HeteroStage:
        """Return the stage of so many layers at a place, which recomputes where it has to."""
        edge, flying = edge_of(self.problem, place.is_first, place.behind is None), int(self._flying[row, 0])
        keeping = HeteroStage(place.groups, layers)
        fits = held_bytes(self.problem, self.replicas, keeping, edge, flying) <= place.groups.kind.memory_bytes
        return HeteroStage(place.groups, layers, recompute=not fits)

    def _priced(self, groups: Groups, edge: EndCosts, hand_over: float) -> Costs:
        seconds = self._seconds(groups, edge) + hand_over
        ends = update_seconds(self.problem, self.replicas, groups, self._layers, edge)
        bubble = self.problem.bubble
        return Costs(_times(bubble, seconds), _times(self._count - bubble, seconds) + ends)

    def _seconds(self, groups: Groups, edge: EndCosts) -> Numbers:
        """Return the seconds of a micro-batch without what is handed over; infinite where memory does not hold it."""
        if (groups, edge) not in self._work:
            self._work[groups, edge] = self._new_seconds(groups, edge)
        return self._work[groups, edge]

    def _new_seconds(self, groups: Groups, edge: EndCosts) -> Numbers:
        problem, layer = self.problem, groups.layer
        states = [state_bytes(problem, self.replicas, groups, n, edge) for n in range(problem.num_layers + 1)]
        left = groups.kind.memory_bytes - np.array(states, dtype=np.float64)[None, :]
        result: Numbers = np.full((len(self._flying), problem.num_layers + 1), np.inf)
        for recompute in (True, False) if problem.freedom.recompute else (False,):
            kept = activation_bytes(layer, self._layers, edge, self._flying, recompute)
            result = np.where(kept <= left, work_seconds(groups, self._layers, edge, recompute), result)
        result[0], result[:, 0] = np.inf, np.inf
        return result


def _times(factor: float, seconds: Numbers) -> Numbers:
    """Return the product, infinite where seconds are, even for a factor of 0."""
    fits = np.isfinite(seconds)
    return np.where(fits, factor * np.where(fits, seconds, 0.0), np.inf)
