"""Lower bounds of the upper level: what no arrangement of given groups is faster than.

Left out are the order of the groups, what is handed over, and what stands before and after the layers; the j-th stage
of some groups is at least the j-th from the end. Then for a limit B on the maximum of (1) in `cost` each stage takes so
many layers at most, all of them together have to take all, and the sum is least where the layers that add least to it
are filled first. So the bound is min_B B + sum(B), over all B that some stage can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from hetu_fx.planner.search.heteroauto.cost import Groups, Numbers
from hetu_fx.planner.search.heteroauto.sweep import Choice
from hetu_fx.planner.search.heteroauto.tables import Tables


class Bounds:
    """Lower bounds for choices of some groups, for one number of replicas."""

    def __init__(self, tables: Tables, groups: Iterable[Groups]) -> None:
        self._tables = tables
        self._bounds = {one: tables.least_bounds(one) for one in groups}
        values = np.unique(np.concatenate([bounds.ravel() for bounds in self._bounds.values()]))
        self._limits: Numbers = values[np.isfinite(values)]
        self._most: dict[Choice, Numbers] = {}

    def seconds(self, choices: Sequence[Choice]) -> float:
        """Return seconds that no arrangement of the choices is below; infinite where none fits memory."""
        left = np.full(len(self._limits), float(self._tables.problem.num_layers))
        seconds = self._limits.copy()
        for choice in sorted(choices, key=lambda choice: self._tables.least_share(choice.groups)):
            taken = np.minimum(left, self._most_layers(choice))
            seconds += self._tables.least_share(choice.groups) * taken
            left -= taken
        return float(seconds[left == 0].min(initial=math.inf))

    def _most_layers(self, choice: Choice) -> Numbers:
        """Return how many layers the stages of a choice take at most within each limit."""
        if choice not in self._most:
            bounds = np.sort(self._bounds[choice.groups][1 : choice.most_stages + 1].ravel())
            self._most[choice] = np.searchsorted(bounds, self._limits, side="right").astype(np.float64)
        return self._most[choice]
