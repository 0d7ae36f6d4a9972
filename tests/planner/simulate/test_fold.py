from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.simulate.fold import Fold
from hetu_fx.planner.simulate.simulate import expect, num_jobs, simulate, simulated_seconds
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

SLOW = Link(2e7, 1e-5)


def staged(*pipelines: tuple[int, ...], micro_batches: int = 4) -> Plan:
    return Plan(
        tuple(Pipeline(tuple(Stage((rank,)) for rank in ranks), micro_batches=micro_batches) for ranks in pipelines)
    )


def test_pipelines_that_see_alike_nodes_are_one() -> None:
    cluster = paper(*[1] * 4, nodes="abab", inter=SLOW)
    fold = Fold.of(staged((0, 1), (2, 3)), (8, 8), cluster)
    assert fold.like == (0, 0)
    assert fold.device_like == {0: 0, 1: 1, 2: 0, 3: 1}
    # both hand over from the one node to the other
    assert fold.of_pipeline(0)({("out of node", 0): 1.0, ("out", 0): 1.0}) == {("out of node", 0): 2.0, ("out", 0): 1.0}


def test_what_goes_around_all_counts_as_at_the_busiest_of_those_alike() -> None:
    fold = Fold.of(staged((0, 1), (2, 3)), (8, 8), paper(*[1] * 4, nodes="aabb"))
    assert fold.unit_like == {("node", 0): ("node", 0), ("node", 1): ("node", 0)}
    assert fold.of_all({("out", 0): 1.0, ("out", 2): 3.0, ("out of node", 1): 2.0}) == {
        ("out", 0): 3.0,
        ("out of node", 0): 2.0,
    }


@pytest.mark.parametrize("rows", [(8, 7), (8, 8)])
def test_rows_or_speeds_or_neighbours_that_differ_keep_pipelines_apart(rows: tuple[int, int]) -> None:
    plan = staged((0, 1), (2, 3))
    unlike = paper(1, 1, 1, 2) if rows == (8, 8) else paper(1, 1, 1, 1)
    assert Fold.of(plan, rows, unlike).like == (0, 1)
    assert Fold.of(plan, (8, 8), paper(1, 1, 1, 1, nodes="aabc")).like == (0, 1)


@pytest.mark.parametrize("nodes", ["aaaaaaaa", "aabbaabb", "abababab", "aaaabbbb", "abcdabcd"])
@pytest.mark.parametrize("pipelines", [((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1), (3, 2), (4, 5), (7, 6))])
def test_one_for_all_takes_as_long_as_all(nodes: str, pipelines: tuple[tuple[int, ...], ...]) -> None:
    cluster, costs, plan = paper(*[1] * 8, nodes=nodes, inter=SLOW), transformer(rows=16), staged(*pipelines)
    assert simulated_seconds(plan, costs, cluster) == pytest.approx(simulate(plan, costs, cluster).seconds, rel=1e-9)


def test_one_for_all_takes_as_long_as_all_in_chunks() -> None:
    cluster, costs = paper(*[1] * 8, nodes="aabbaabb", inter=SLOW), transformer(layers=6, rows=16)
    plan = replace(staged((0, 1), (2, 3), (4, 5), (6, 7)), schedule="interleaved", chunks=3)
    assert simulated_seconds(plan, costs, cluster) == pytest.approx(simulate(plan, costs, cluster).seconds, rel=1e-9)


def test_what_is_expected_is_simulated_and_knows_what_the_formula_says() -> None:
    plan, costs, cluster = staged((0, 1), (2, 3)), transformer(), paper(1, 1, 1, 1)
    found = expect(plan, costs, cluster)
    assert found.seconds == simulated_seconds(plan, costs, cluster)
    assert found.formula_seconds is not None


def test_more_micro_batches_are_more_jobs() -> None:
    assert num_jobs(staged((0, 1), micro_batches=8)) == 2 * num_jobs(staged((0, 1)))
