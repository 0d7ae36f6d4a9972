import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.search.homogeneous import HOMOGENEOUS, candidates, stage_counts
from hetu_fx.planner.search.problem import LEAST_PRICED, WORTH, Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=6, rows=12, length=128, width=256)
SLOW = Link(2e9, 1e-5)


def all_homogeneous(problem: Problem) -> Iterator[Plan]:
    """Yield every plan of equal pipelines of even stages on the first devices."""
    count, counts = len(problem.cluster.devices), problem.options.micro_batches
    degrees = product(range(1, count + 1), range(1, 7), (1, 2, 4), counts, (0, 1))
    for pipelines, stages, group, micro_batches, zero in degrees:
        if pipelines * stages * group <= count and pipelines <= COSTS.rows:
            for first, step in ((lambda i, s: i * s, 1), (lambda i, s: i, pipelines)):
                made = tuple(
                    Pipeline(
                        tuple(Stage(ranks(first(i, stages) + j * step, group)) for j in range(stages)),
                        micro_batches=micro_batches,
                    )
                    for i in range(pipelines)
                )
                yield Plan(made, zero=zero).with_blocks(COSTS.num_blocks)


def ranks(number: int, size: int) -> tuple[int, ...]:
    return tuple(range(number * size, number * size + size))


@pytest.mark.parametrize(
    "cluster",
    [
        paper(1, 1, 1, 1, 1, 1),
        paper(*[100] * 8, nodes="aaaabbbb", inter=SLOW),
        paper(*[100] * 8, nodes="aaaabbbb", inter=SLOW, memory_bytes=int(2 * COSTS.whole.parameter_bytes)),
        paper(4, 4, 2, 2),
    ],
    ids=["equal", "nodes", "memory", "unequal"],
)
def test_it_is_as_fast_as_the_best_of_all_homogeneous_plans(cluster: Cluster) -> None:
    problem = Problem(Profile(COSTS), cluster)
    priced = (problem.fit_memory(plan) for plan in all_homogeneous(problem))
    best = min(found[1] for found in priced if found is not None)
    assert min(HOMOGENEOUS.find(problem).values()) <= best * (1 + 1e-9)


def test_estimates_are_what_is_predicted_where_pipelines_stand_in_nodes() -> None:
    problem = Problem(Profile(COSTS), paper(*[100] * 8, nodes="aaaabbbb", inter=SLOW))
    for candidate in sorted(candidates(problem), key=lambda candidate: candidate.seconds)[:20]:
        found = problem.fit_memory(candidate.plan(problem))
        assert found is not None
        rows = math.ceil(COSTS.rows / candidate.degrees.pipelines)
        if rows % candidate.micro_batches == 0:
            assert found[1] == pytest.approx(candidate.seconds, rel=0.2)
        else:  # estimated as if all micro-batches had as many rows as the first
            assert found[1] < 1.1 * candidate.seconds


def test_a_thousand_devices_are_told_apart_by_what_they_are() -> None:
    costs = transformer(layers=48, rows=1024, units=8)
    cluster = paper(*[100] * 1024, nodes="".join(chr(65 + rank // 8) for rank in range(1024)), inter=SLOW)
    found = min(candidates(Problem(Profile(costs), cluster)), key=lambda candidate: candidate.seconds)
    degrees = found.degrees
    assert degrees.pipelines * degrees.stages * degrees.group <= 1024
    assert {len(found.arrangement.groups(i)) for i in range(degrees.pipelines)} == {degrees.stages}


def test_what_options_rule_out_is_not_tried() -> None:
    options = PlanOptions(micro_batches=(1, 2), tensor_parallel=False, pipelines=False, zero=0)
    problem = Problem(Profile(COSTS), paper(1, 1, 1, 1), options)
    found = list(candidates(problem))
    assert {(c.degrees.stages, c.degrees.group, c.zero) for c in found} == {(1, 1, 0)}
    assert {c.micro_batches for c in found} == {1, 2}


def test_numbers_of_stages_with_the_same_largest_stage_are_tried_once() -> None:
    assert stage_counts(5, 8) == [1, 2, 3, 4, 5]
    assert stage_counts(16, 32) == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]
    assert stage_counts(4, 0) == [1]


def test_plans_that_do_not_fit_are_not_found() -> None:
    problem = Problem(Profile(COSTS), paper(1, 1, memory_bytes=1000))
    assert not HOMOGENEOUS.find(problem)
    assert HOMOGENEOUS.find(replace(problem, cluster=paper(1, 1)))


def test_what_is_far_from_the_best_that_was_priced_is_not_looked_for() -> None:
    problem = Problem(Profile(COSTS), paper(*[100] * 8, nodes="aaaabbbb", inter=SLOW))
    found = HOMOGENEOUS.find(problem)
    best = min(found.values())
    assert problem.priced.least_seconds == best
    assert problem.priced.worth_seconds == WORTH * best
    for _ in range(LEAST_PRICED):
        problem.priced.add(best / 100)
    assert list(candidates(problem)) == []
    assert list(candidates(replace(problem)))  # another problem, of which nothing is known


def test_a_few_plans_are_priced_whatever_they_take() -> None:
    priced = Problem(Profile(COSTS), paper(100, 100)).priced
    for _ in range(LEAST_PRICED - 1):
        priced.add(1.0)
    assert priced.worth_seconds == math.inf
    priced.add(2.0)
    assert priced.worth_seconds == WORTH
