from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.price.recompute import fitted, least_blocks
from hetu_fx.planner.price.step import memory_problems, predict
from hetu_fx.planner.search.estimates import Builder
from hetu_fx.planner.search.replica import ReplicaRules
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=6, rows=8, length=256, width=256)
OPTIONS = PlanOptions()
TIGHT = int(2.0 * COSTS.whole.parameter_bytes)
ROOMIER = int(2.5 * COSTS.whole.parameter_bytes)
PIPELINE = Plan((Pipeline((Stage((0, 1), blocks=3), Stage((2, 3), blocks=3)), micro_batches=4),))


def recomputed(plan: Plan) -> list[int]:
    return [stage.recompute for *_, stage in plan.stages]


def fits(plan: Plan, cluster: Cluster) -> bool:
    return not memory_problems(predict(plan, COSTS, cluster), cluster, OPTIONS.memory_fraction)


@pytest.mark.parametrize("least", range(7))
def test_the_least_number_of_blocks_is_found_wherever_it_is(least: int) -> None:
    assert least_blocks(6, lambda blocks: blocks >= least) == least


def test_nothing_is_found_where_all_blocks_do_not_help() -> None:
    assert least_blocks(6, lambda blocks: False) is None
    assert least_blocks(0, lambda blocks: False) is None


def test_a_plan_that_fits_recomputes_nothing() -> None:
    again = tuple(replace(stage, recompute=3) for stage in PIPELINE.pipelines[0].stages)
    asked = replace(PIPELINE, pipelines=(replace(PIPELINE.pipelines[0], stages=again),))
    found = fitted(asked, COSTS, paper(1, 1, 1, 1), OPTIONS)
    assert found is not None
    assert found[0] == PIPELINE


def test_stages_recompute_as_few_blocks_as_fit() -> None:
    cluster = paper(1, 1, 1, 1, memory_bytes=ROOMIER)
    assert not fits(PIPELINE, cluster)
    found = fitted(PIPELINE, COSTS, cluster, OPTIONS)
    assert found is not None
    plan, prediction = found
    assert fits(plan, cluster)
    assert prediction.seconds == predict(plan, COSTS, cluster).seconds
    assert prediction.seconds > predict(PIPELINE, COSTS, cluster).seconds
    stages = plan.pipelines[0].stages
    for index, stage in enumerate(stages):
        if stage.recompute:
            fewer = (*stages[:index], replace(stage, recompute=stage.recompute - 1), *stages[index + 1 :])
            assert not fits(replace(plan, pipelines=(replace(plan.pipelines[0], stages=fewer),)), cluster)


def test_the_front_of_a_pipeline_recomputes_more_than_its_end() -> None:
    found = fitted(PIPELINE, COSTS, paper(1, 1, 1, 1, memory_bytes=ROOMIER), OPTIONS)
    assert found is not None
    front, end = recomputed(found[0])
    assert front > end


def test_what_does_not_fit_with_all_blocks_recomputed_is_refused() -> None:
    assert fitted(PIPELINE, COSTS, paper(1, 1, 1, 1, memory_bytes=TIGHT // 2), OPTIONS) is None
    off = replace(OPTIONS, recompute=False)
    assert fitted(PIPELINE, COSTS, paper(1, 1, 1, 1, memory_bytes=TIGHT), off) is None


@pytest.mark.parametrize("search", ["auto", "homogeneous", "classes", "contiguous", "malleus", "heteroauto"])
def test_searches_recompute_where_memory_allows_no_plan_without(search: str) -> None:
    cluster = paper(2, 2, 1, 1, memory_bytes=TIGHT)
    with pytest.raises(PlanError, match="no plan fits"):
        make_plan(COSTS, cluster, options=PlanOptions(recompute=False), search=search)
    plan = make_plan(COSTS, cluster, search=search)
    assert any(recomputed(plan))
    assert fits(plan, cluster)
    assert "recompute" in plan.explain()


@pytest.mark.parametrize("search", ["auto", "homogeneous", "classes", "contiguous", "malleus", "heteroauto"])
def test_searches_recompute_nothing_where_memory_is_ample(search: str) -> None:
    asked = make_plan(COSTS, paper(2, 2, 1, 1), search=search)
    assert not any(recomputed(asked))
    assert asked == make_plan(COSTS, paper(2, 2, 1, 1), options=PlanOptions(recompute=False), search=search)


def test_a_plan_made_anew_for_a_slow_device_recomputes_too() -> None:
    cluster = paper(2, 2, 2, 2, memory_bytes=TIGHT)
    plans = [make_plan(COSTS, cluster.with_rates(rates)) for rates in ({}, {0: 3.0})]
    assert all(any(recomputed(plan)) for plan in plans)
    assert all(fits(plan, cluster) for plan in plans)


def test_blocks_leave_stages_that_keep_more_micro_batches() -> None:
    costs = replace(transformer(layers=12, rows=8, length=2048, width=64, vocabulary=8), after=PartCosts())
    kept, blocks = costs.blocks[0].activation_bytes, []
    for memory in (1 << 40, int(9 * kept)):
        rules = ReplicaRules("1f1b", 1, (8,), dict.fromkeys(range(2), memory))
        (replica,) = Builder(costs, paper(1, 1), rules, micro_rows=1).build(((0,), (1,)))
        blocks.append([stage.blocks for stage in replica.pipeline.stages])
        assert replica.most_micro_rows(8, 1, rules) >= 1
    assert blocks == [[6, 6], [4, 8]]
