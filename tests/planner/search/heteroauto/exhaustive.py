"""Every pipeline there is, for small problems: nothing is bounded, no order or recomputation is taken for granted.

And (1) of `cost` as it is written there, for one pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from hetu_fx.planner.search.heteroauto.chip_cost import (
    Groups,
    HeteroStage,
    edge_costs,
    hand_over_seconds,
    held_bytes,
    update_seconds,
    work_seconds,
)
from hetu_fx.planner.search.heteroauto.chip_problem import HeteroProblem
from hetu_fx.planner.values.device_memory import in_flight

Left = tuple[tuple[Groups, int], ...]
"""Groups that hold no stage yet, and how many stages they have groups for."""


@dataclass
class Exhaustive:
    """Looks at every pipeline in which each kind has groups of one size."""

    problem: HeteroProblem
    num_pipelines: int = 0
    _known: dict[object, tuple[float, float] | None] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> float:
        """Return the least seconds of a step; infinite where nothing fits."""
        return min((self._fastest(replicas, left) for replicas, left in self._chosen()), default=math.inf)

    def _chosen(self) -> Iterator[tuple[int, Left]]:
        for replicas, groups in product(self.problem.replicas, self._groups()):
            yield replicas, tuple((one, one.kind.num_groups(one.degree) // replicas) for one in groups)

    def _groups(self) -> Iterator[tuple[Groups, ...]]:
        kinds = self.problem.kinds
        if self.problem.freedom.degree_per_kind:
            yield from product(*([Groups(kind, degree) for degree in kind.degrees] for kind in kinds))
        else:
            for degree in {degree for kind in kinds for degree in kind.degrees}:
                yield tuple(Groups(kind, degree) for kind in kinds if degree in kind.degrees)

    def _fastest(self, replicas: int, left: Left) -> float:
        return self._put_in_front(replicas, left, None, 0, 1, self.problem.num_layers, (0.0, 0.0), frozenset())

    def _put_in_front(
        self,
        replicas: int,
        left: Left,
        behind: Groups | None,
        more: int,
        row: int,
        layers_left: int,
        before: tuple[float, float],
        sizes: frozenset[int],
    ) -> float:
        """Return the least seconds of all pipelines with this end: `more` stages may stand on what is foremost."""
        best = math.inf
        same = [(behind, more - 1, left)] if behind is not None and more else []
        others = [(g, n - 1, tuple(pair for pair in left if pair[0] is not g)) for g, n in left if n]
        for groups, after, rest in (*same, *others):
            for layers, recompute in product(range(1, layers_left + 1), (False, True)):
                costs = self._costs(replicas, groups, behind, row, layers, recompute, layers == layers_left)
                used = sizes | {layers}
                if costs is None or not self._may(used):
                    continue
                sums = before[0] + costs[0], max(before[1], costs[1])
                if layers == layers_left:
                    self.num_pipelines += 1
                    best = min(best, sum(sums))
                else:
                    found = self._put_in_front(replicas, rest, groups, after, row + 1, layers_left - layers, sums, used)
                    best = min(best, found)
        return best

    def _may(self, sizes: frozenset[int]) -> bool:
        return self.problem.freedom.uneven_layers or max(sizes) - min(sizes) <= 1

    def _costs(
        self,
        replicas: int,
        groups: Groups,
        behind: Groups | None,
        row: int,
        layers: int,
        recompute: bool,
        is_first: bool,
    ) -> tuple[float, float] | None:
        key = (replicas, id(groups), id(behind), row, layers, recompute, is_first)
        if key not in self._known:
            stage = HeteroStage(groups, layers, recompute)
            self._known[key] = self._new_costs(replicas, stage, behind, row, is_first)
        return self._known[key]

    def _new_costs(
        self, replicas: int, stage: HeteroStage, behind: Groups | None, row: int, is_first: bool
    ) -> tuple[float, float] | None:
        problem, groups = self.problem, stage.groups
        count, edge = problem.num_micro_batches // replicas, edge_costs(problem, is_first, behind is None)
        flying = in_flight(problem.schedule, 0, row, count)
        fits = held_bytes(problem, replicas, stage, edge, flying) <= groups.kind.memory_bytes
        if not fits or (stage.recompute and not problem.freedom.recompute):
            return None
        seconds = work_seconds(groups, float(stage.layers), edge, stage.recompute)
        seconds += 0.0 if behind is None else hand_over_seconds(problem, groups, behind)
        end = update_seconds(problem, replicas, groups, float(stage.layers), edge)
        return problem.bubble * seconds, (count - problem.bubble) * seconds + end


def step_seconds(problem: HeteroProblem, replicas: int, stages: Sequence[HeteroStage]) -> float:
    """Return (1) for equal replicas of a pipeline; infinite where a stage does not fit its memory."""
    count = problem.num_micro_batches // replicas
    seconds, ends = [], []
    for index, stage in enumerate(stages):
        edge = edge_costs(problem, index == 0, index == len(stages) - 1)
        flying = in_flight(problem.schedule, index, len(stages), count)
        if held_bytes(problem, replicas, stage, edge, flying) > stage.groups.kind.memory_bytes:
            return math.inf
        behind = [hand_over_seconds(problem, stage.groups, other.groups) for other in stages[index + 1 : index + 2]]
        seconds.append(work_seconds(stage.groups, float(stage.layers), edge, stage.recompute) + sum(behind))
        ends.append(update_seconds(problem, replicas, stage.groups, float(stage.layers), edge))
    largest = max((count - problem.bubble) * s + u for s, u in zip(seconds, ends, strict=True))
    return problem.bubble * math.fsum(seconds) + largest
