"""Seconds that no plan is faster than: held against whatever searches find, and reached by one device."""

from __future__ import annotations

import math

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.price.step import bound_seconds, predict
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import SEARCHES
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

CLUSTERS = {
    "equal": paper(4, 4, 4, 4),
    "unlike": paper(4, 4, 2, 1, nodes="aabb", inter=Link(1e9, 1e-5)),
    "straggling": paper(4, 4, 4, 4).with_rates({1: 2.5}),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("name", ["homogeneous", "classes", "contiguous", "malleus"])
@pytest.mark.parametrize("allow", [(), ("sequence_parallel",)])
def test_no_plan_that_a_search_finds_is_below_the_bound(cluster: Cluster, name: str, allow: tuple[str, ...]) -> None:
    problem = Problem(Profile(transformer()), cluster, PlanOptions().chosen(Choice(allow=allow)))
    found = SEARCHES[name].find(problem)
    assert len(found) > 1
    assert min(found.values()) >= bound_seconds(problem.costs, cluster.devices)


def test_one_device_takes_just_the_bound() -> None:
    costs, cluster = transformer(), paper(4)
    assert math.isclose(predict(Plan.single(), costs, cluster).seconds, bound_seconds(costs, cluster.devices))
