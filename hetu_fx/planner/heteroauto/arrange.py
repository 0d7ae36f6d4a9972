"""The lower level, exact: which of given groups follow which, in how many stages, of how many layers each.

Minimise (1) of `cost`, which is sum_j share_j + max_k bound_k. `sweep` finds the least sum F(B) for a limit B on the
maximum. F falls as B grows; so B starts where nothing above can be better, and falls to just below the maximum of what
was found, or to where F alone is too much, until nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.search.heteroauto.cost import HeteroStage
from hetu_fx.planner.search.heteroauto.sweep import Choice, Step, Sweep
from hetu_fx.planner.search.heteroauto.tables import Tables


@dataclass(frozen=True, slots=True)
class Arranged:
    """The stages of a pipeline, in order, and the seconds of a step."""

    seconds: float
    stages: tuple[HeteroStage, ...]


def arrange(tables: Tables, choices: Sequence[Choice], below: float) -> Arranged | None:
    """Return the fastest arrangement of less than `below` seconds, None when there is none."""
    best: Arranged | None = None
    for sizes in _sizes(tables):
        best = _descend(tables, choices, below if best is None else best.seconds, sizes) or best
    return best


def _sizes(tables: Tables) -> Iterator[list[int]]:
    """Yield the numbers of layers that stages of one pipeline may have."""
    count = tables.problem.num_layers
    if tables.problem.freedom.uneven_layers:
        yield list(range(1, count + 1))
    else:
        least = {count // stages for stages in range(1, count + 1)}
        yield from ([n for n in (size, size + 1) if n <= count] for size in sorted(least))


def _descend(tables: Tables, choices: Sequence[Choice], below: float, sizes: list[int]) -> Arranged | None:
    best: Arranged | None = None
    limit = below - tables.problem.num_layers * min(tables.least_share(choice.groups) for choice in choices)
    while _may_hold(tables, choices, limit, sizes):
        found = Sweep(tables, choices, math.nextafter(limit, -math.inf), sizes).solve()
        if found is None:
            break
        share, steps = found
        largest = max(_bound(tables, step) for step in steps)
        if share + largest < below:
            below = share + largest
            best = Arranged(below, tuple(tables.stage(s.place, s.row, s.layers) for s in steps))
        limit = min(below - share, largest)
    return best


def _may_hold(tables: Tables, choices: Sequence[Choice], limit: float, sizes: list[int]) -> bool:
    """Tell whether all stages together could hold all layers within the limit, wherever they stand."""
    held = 0
    for choice in choices:
        fits = tables.least_bounds(choice.groups)[1 : choice.most_stages + 1, sizes] <= limit
        held += int((fits * sizes).max(axis=1, initial=0).sum())
    return held >= tables.problem.num_layers


def _bound(tables: Tables, step: Step) -> float:
    return float(tables.costs(step.place).bound[step.row, step.layers])
