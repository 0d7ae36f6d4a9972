"""Plans for devices of a few classes: the cluster is cut in regions, each of which has equal pipelines.

A region is some classes (devices that are alike) that follow each other in order of speed; some may be left out. Its
pipelines have the same number of groups of each of its classes, the slow ones in front (the front keeps more
activations, and slow devices hold few blocks) or at the end. Blocks go to stages so that these end together, within
memory; rows go to regions so that those do. So two kinds become pipelines of both, or pipelines of one kind each,
whatever is faster: the shapes of the published plans for H800 beside H20 (Hetu v2, section 6.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.homogeneous import best_priced, finalists
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.search.templates import KEPT, Region, Template, Templates, classes_of
from hetu_fx.plans.plan import Plan

MOST_CLASSES = 6
"""So many classes of devices are few."""


def cuts(classes: Region) -> Iterator[tuple[Region, ...]]:
    """Yield the ways to cut classes in runs, and to leave some runs out; some ways come more than once."""
    if not classes:
        yield ()
    for stop in range(1, len(classes) + 1):
        for rest in cuts(classes[stop:]):
            yield (classes[:stop], *rest)
            yield rest


@dataclass(frozen=True, slots=True)
class Estimated:
    """Templates of the regions of a cut with their rows, and the seconds that they are estimated to take."""

    seconds: float
    chosen: tuple[Template, ...]
    rows: tuple[int, ...]

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        pairs = zip(self.chosen, self.rows, strict=True)
        made = (pipeline for template, count in pairs for pipeline in template.made(count))
        return problem.plan(sorted(made, key=lambda pipeline: min(pipeline.devices)))


def estimated(problem: Problem) -> Iterator[Estimated]:
    """Yield what plans are estimated to take."""
    templates = Templates(problem)
    for cut in dict.fromkeys(cuts(tuple(range(len(templates.classes))))):
        kept = [templates.best(region)[: max(1, KEPT >> 2 * (len(cut) - 1))] for region in cut]
        for chosen in itertools.product(*kept) if cut else ():
            made = estimate(chosen, problem, templates.estimates)
            if made is not None:
                yield made


def estimate(chosen: tuple[Template, ...], problem: Problem, estimates: Estimates) -> Estimated | None:
    """Return the templates with the rows that let them end together; None where one cannot do its rows."""
    rows = _rows_of_templates(chosen, problem.costs.rows)
    return None if rows is None else Estimated(seconds_of(chosen, rows, problem, estimates), chosen, rows)


def _rows_of_templates(chosen: Sequence[Template], total: int) -> tuple[int, ...] | None:
    """Return the rows of each region; None where one that must have some cannot do them."""
    counts = [len(template.pipelines) for template in chosen]
    rows = spread(total, [template.seconds for template in chosen], low=counts)
    fits = rows is not None and all(t.seconds(n) < math.inf for t, n in zip(chosen, rows, strict=True))
    return rows if fits else None


def seconds_of(chosen: Sequence[Template], rows: Sequence[int], problem: Problem, estimates: Estimates) -> float:
    longest = max(template.seconds(count) for template, count in zip(chosen, rows, strict=True))
    firsts = [first for template in chosen for first in template.ends[0]]
    replicas = [template.family.replica for template in chosen]
    return longest + estimates.ends(replicas, firsts, chosen[0].ends[1], problem.options.zero)


def _find(problem: Problem) -> Candidates:
    problem.tell(f"classes: {len(classes_of(problem))} classes of devices")
    found = sorted(estimated(problem), key=lambda one: one.seconds)
    most = finalists(len(problem.cluster.devices))
    return best_priced(list(dict.fromkeys(one.plan(problem) for one in found[: 4 * most])), problem, most)


def _lacks(problem: Problem) -> str:
    count = len(classes_of(problem))
    if count <= MOST_CLASSES:
        return ""
    return f"it plans for up to {MOST_CLASSES} classes (kind, speed, memory) of devices, but there are {count}"


CLASSES = Search(
    name="classes",
    applies="devices of a few kinds: equal pipelines over one kind or several, blocks and rows by speed and memory",
    lacks=_lacks,
    find=_find,
)
