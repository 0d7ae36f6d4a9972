"""Bounds that searches leave plans out by: none is above what it is a bound of."""

import itertools
import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.price.fitting import fit_recompute
from hetu_fx.planner.search.allocate import least_longest, least_passing
from hetu_fx.planner.search.estimates import Estimates, replica_rules
from hetu_fx.planner.search.homogeneous import PlanBounds, candidates
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.templates import DeviceAllotment, TemplateRegion, Templates
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.profile_file import Profile
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=12, rows=48, length=256, width=512, units=4)
CLUSTER = paper(*[400] * 4, *[100] * 8, nodes="aaaabbbbcccc", inter=Link(1e9, 1e-5))
LINES = st.builds(Line, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([1.0, 2.5, 7.0]))


@settings(max_examples=200)
@given(st.integers(1, 9), st.lists(LINES, min_size=1, max_size=4), st.sampled_from([0, 1, 7]))
def test_items_take_no_less_than_what_is_said(total: int, lines: list[Line], weight: int) -> None:
    counts = [n for n in product(range(1, total + 1), repeat=len(lines)) if sum(n) == total]
    times = [[line(n) for line, n in zip(lines, chosen, strict=True)] for chosen in counts]
    longest = min((max(found) for found in times), default=math.inf)
    passing = min((sum(found) + weight * max(found) for found in times), default=math.inf)
    alike = Counter(lines).items()
    assert least_longest(total, alike) <= longest * (1 + 1e-9)
    assert least_passing(total, alike, weight) <= passing * (1 + 1e-9)
    if not counts:
        assert least_passing(total, alike, weight) == math.inf
    if counts and len(set(lines)) == 1:
        assert least_longest(total, alike) == pytest.approx(longest)


def deals() -> list[tuple[Templates, DeviceAllotment]]:
    templates = Templates(Problem(Profile(COSTS), CLUSTER))
    return [(templates, deal) for region in ((0,), (1,), (0, 1)) for deal in templates._all(region, COSTS.rows)]


def test_pipelines_and_the_end_of_a_step_take_no_less_than_what_deals_say() -> None:
    met = 0
    for templates, deal in deals():
        bounds = deal.bounds(templates.estimates, COSTS.rows)
        family = templates.estimates.family(deal.pipeline(0), deal.count, deal.rows(COSTS.rows))
        if family is not None:
            made = deal.template(family, templates.estimates, 1)
            least = min(seconds for seconds, _ in bounds.pipeline)
            assert 0 < least <= made.seconds(COSTS.rows)
            met += least > 0.9 * made.seconds(COSTS.rows)
            for zero, is_alone in itertools.product((0, 1), (False, True)):
                placed = deal.template(family, templates.estimates, zero, is_alone=is_alone)
                assert TemplateRegion((), zero, is_alone).least_seconds(bounds) <= placed.step_seconds(COSTS.rows)
    assert met > len(deals()) / 2  # they are no bounds that rule nothing out


def test_nothing_is_said_of_blocks_that_differ() -> None:
    problem = Problem(Profile(transformer(layers=2, rows=8)), CLUSTER)
    estimates = Estimates(problem.costs, problem.cluster, replica_rules(problem, 1))
    assert estimates.least_seconds(((0,), (1,)), 4) == 0.0


def test_homogeneous_plans_take_no_less_than_their_degrees_say() -> None:
    problem = Problem(Profile(COSTS), CLUSTER)
    bounds, slowest = PlanBounds(problem), 0
    for candidate in candidates(problem):
        least = candidate.degrees.least_seconds(bounds)
        priced = fit_recompute(candidate.plan(problem), COSTS, CLUSTER, problem.options)
        assert priced is not None
        assert least <= priced.overlapped_seconds
        slowest += least > 0.7 * priced.overlapped_seconds
    assert slowest
