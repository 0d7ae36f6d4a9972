"""Plans for devices of a few classes: the cluster is cut in regions, each of which has equal pipelines.

A region is some classes (devices that are alike) that follow each other in order of speed; some may be left out. Its
templates are equal pipelines over these, fastest first: with the same number of groups of each of its classes, the slow
ones in front (the front keeps more activations, and slow devices hold few blocks) or at the end. Blocks go to stages so
that these end together, within memory; rows go to regions so that those do. So two kinds become pipelines of both, or
pipelines of one kind each, whatever is faster: the shapes of the published plans for H800 beside H20 (Hetu v2, section
6.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.price.step import bound_seconds
from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.estimates import Estimates
from hetu_fx.planner.search.homogeneous import price_best_plans
from hetu_fx.planner.search.problem import WORTH, Candidates, Problem, Search, in_all_splits
from hetu_fx.planner.search.step_ends import EndEstimate
from hetu_fx.planner.search.templates import Region, Template, TemplateRegion, Templates, device_classes
from hetu_fx.plans.plan import Plan

MOST_CLASSES = 6
"""So many classes of devices are few."""

KEPT = 16
"""So many templates of a region are tried; fewer where they are combined with those of others."""


def cuts(classes: Region) -> Iterator[tuple[Region, ...]]:
    """Yield the ways to cut classes in runs, and to leave some runs out; some ways come more than once."""
    if not classes:
        yield ()
    for stop in range(1, len(classes) + 1):
        for rest in cuts(classes[stop:]):
            yield (classes[:stop], *rest)
            yield rest


@dataclass(frozen=True, slots=True)
class TimedTemplates:
    """Templates of the regions of a cut with their rows, and the seconds that they are estimated to take."""

    seconds: float
    chosen: tuple[Template, ...]
    rows: tuple[int, ...]

    @property
    def zero(self) -> int:
        """Return how optimizer states are kept."""
        return self.chosen[0].family.rules.zero

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        pairs = zip(self.chosen, self.rows, strict=True)
        made = (pipeline for template, count in pairs for pipeline in template.made(count))
        plan = problem.plan(sorted(made, key=lambda pipeline: min(pipeline.devices)))
        return replace(plan, zero=self.zero)


def estimate_templates(problem: Problem, templates: Templates | None = None) -> Iterator[TimedTemplates]:
    """Yield what plans of templates are estimated to take, those of this module unless others are given."""
    templates, least = Templates(problem) if templates is None else templates, math.inf
    asked = itertools.product(_cuts_by_speed(problem, templates.classes), reversed(range(problem.options.zero + 1)))
    for (bound, cut), zero in asked:
        if problem.time_limit.ends(least < math.inf):
            return
        if bound > WORTH * least:
            break
        places = [TemplateRegion(region, zero, len(cut) == 1) for region in cut]
        count = max(1, KEPT >> 2 * (len(cut) - 1))
        below = WORTH * least if len(cut) == 1 else math.inf
        for chosen in itertools.product(*(templates.best(place, count, below) for place in places)):
            if templates.expected_seconds(chosen, cut) > WORTH * least:
                continue
            is_single = sum(len(template.pipelines) for template in chosen) == 1  # states are whole in any case
            made = None if is_single and zero < problem.options.zero else estimate(chosen, problem, templates.estimates)
            if made is not None:
                least = min(least, made.seconds)
                yield made


def _cuts_by_speed(problem: Problem, classes: Sequence[Sequence[Device]]) -> list[tuple[float, tuple[Region, ...]]]:
    """Return the cuts in order of seconds that no plan of their devices is below."""
    found = []
    for cut in filter(None, dict.fromkeys(cuts(tuple(range(len(classes)))))):
        devices = itertools.chain.from_iterable(classes[number] for region in cut for number in region)
        found.append((bound_seconds(problem.costs, list(devices)), cut))
    return sorted(found, key=lambda pair: pair[0])


def estimate(chosen: tuple[Template, ...], problem: Problem, estimates: Estimates) -> TimedTemplates | None:
    """Return the templates with the rows that let them end together; None where one cannot do its rows."""
    rows = _rows_of_templates(chosen, problem.costs.rows)
    if rows is None:
        return None
    end, longest = _end_of(chosen, estimates), max(map(Template.seconds, chosen, rows))
    late = max(_late(end, *pair, longest) for pair in zip(chosen, rows, strict=True))
    return TimedTemplates(longest + end.seconds(late), chosen, rows)


def _late(end: EndEstimate, template: Template, rows: int, longest: float) -> float:
    """Return for how long gradients travel after the longest pipelines, if those of a template hold them last."""
    micro_rows = template.micro_rows(rows)
    late = max(line(micro_rows) for line in end.late(template.family.replica))
    return late - (longest - template.seconds(rows))


def _rows_of_templates(chosen: Sequence[Template], total: int) -> tuple[int, ...] | None:
    """Return the rows of each region; None where one that must have some cannot do them."""
    counts = [len(template.pipelines) for template in chosen]
    rows = spread(total, [template.step_seconds for template in chosen], low=counts)
    fits = rows is not None and all(t.seconds(n) < math.inf for t, n in zip(chosen, rows, strict=True))
    return rows if fits else None


def _end_of(chosen: Sequence[Template], estimates: Estimates) -> EndEstimate:
    """Return what ends a step of all these templates."""
    if len(chosen) == 1:
        return chosen[0].end
    firsts, lasts = ([one for template in chosen for one in template.ends[side]] for side in (0, 1))
    replicas = [template.family.replica for template in chosen]
    zero = chosen[0].family.rules.zero
    links = estimates.ends.links([template.held for template in chosen], zero)
    return estimates.ends.of(replicas, firsts, lasts, zero, links)


def _find(problem: Problem) -> Candidates:
    problem.tell(f"classes: {len(device_classes(problem))} classes of devices")
    return price_best_plans(estimate_templates(problem), problem)


def _lacks(problem: Problem) -> str:
    count = len(device_classes(problem))
    if count <= MOST_CLASSES:
        return ""
    return f"it plans for up to {MOST_CLASSES} classes (kind, speed, memory) of devices, but there are {count}"


CLASSES = Search(
    name="classes",
    applies="devices of a few kinds: equal pipelines over one kind or several, blocks and rows by speed and memory",
    lacks=_lacks,
    find=in_all_splits(_find),
)
