from dataclasses import replace
from itertools import product

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.price.fitting import fit_recompute, least_blocks
from hetu_fx.planner.price.step import PricedStep, memory_problems, predict
from hetu_fx.planner.search.contiguous import Builder
from hetu_fx.planner.search.stage_estimates import ReplicaRules
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, rising, transformer

COSTS = transformer(layers=6, rows=8, length=256, width=256)
OPTIONS = PlanOptions()
TIGHT = int(2.0 * COSTS.whole.parameter_bytes)
ROOMIER = int(2.5 * COSTS.whole.parameter_bytes)
TWO_STAGES = Plan((Pipeline((Stage((0, 1), blocks=3), Stage((2, 3), blocks=3)), micro_batches=4),))


def recomputed(plan: Plan) -> list[int]:
    return [stage.recompute for *_, stage in plan.stages]


def fits(plan: Plan, cluster: Cluster) -> bool:
    return not memory_problems(predict(plan, COSTS, cluster), cluster, OPTIONS.memory_fraction)


@pytest.mark.parametrize("least", range(7))
def test_the_least_number_of_blocks_is_found_wherever_it_is(least: int) -> None:
    assert least_blocks(6, lambda blocks: blocks >= least) == least


@pytest.mark.parametrize("known", range(7))
@pytest.mark.parametrize("least", range(7))
def test_the_least_number_of_blocks_is_found_from_what_is_known_of_fewer(least: int, known: int) -> None:
    asked: list[int] = []

    def fits(blocks: int) -> bool:
        asked.append(blocks)
        return blocks >= least

    assert least_blocks(6, fits, known) == max(least, known)
    assert min(asked) >= known
    assert least_blocks(6, lambda blocks: blocks >= least, 7) in (None, 7)


def test_nothing_is_found_where_all_blocks_do_not_help() -> None:
    assert least_blocks(6, lambda blocks: False) is None
    assert least_blocks(0, lambda blocks: False) is None
    assert least_blocks(6, lambda blocks: False, 3) is None


def test_a_plan_that_fits_recomputes_nothing() -> None:
    again = tuple(replace(stage, recompute=3) for stage in TWO_STAGES.pipelines[0].stages)
    asked = replace(TWO_STAGES, pipelines=(replace(TWO_STAGES.pipelines[0], stages=again),))
    found = fit_recompute(asked, COSTS, paper(1, 1, 1, 1), OPTIONS)
    assert found is not None
    assert found.plan == TWO_STAGES


def test_stages_recompute_as_few_blocks_as_fit() -> None:
    cluster = paper(1, 1, 1, 1, memory_bytes=ROOMIER)
    assert not fits(TWO_STAGES, cluster)
    found = fit_recompute(TWO_STAGES, COSTS, cluster, OPTIONS)
    assert found is not None
    plan, prediction = found.plan, found.prediction
    assert fits(plan, cluster)
    assert prediction.seconds == predict(plan, COSTS, cluster).seconds
    assert prediction.seconds > predict(TWO_STAGES, COSTS, cluster).seconds
    stages = plan.pipelines[0].stages
    for index, stage in enumerate(stages):
        if stage.recompute:
            fewer = (*stages[:index], replace(stage, recompute=stage.recompute - 1), *stages[index + 1 :])
            assert not fits(replace(plan, pipelines=(replace(plan.pipelines[0], stages=fewer),)), cluster)


def test_the_front_of_a_pipeline_recomputes_more_than_its_end() -> None:
    found = fit_recompute(TWO_STAGES, COSTS, paper(1, 1, 1, 1, memory_bytes=ROOMIER), OPTIONS)
    assert found is not None
    front, end = recomputed(found.plan)
    assert front > end


def test_what_does_not_fit_with_all_blocks_recomputed_is_refused() -> None:
    assert fit_recompute(TWO_STAGES, COSTS, paper(1, 1, 1, 1, memory_bytes=TIGHT // 2), OPTIONS) is None
    off = replace(OPTIONS, recompute=False)
    assert fit_recompute(TWO_STAGES, COSTS, paper(1, 1, 1, 1, memory_bytes=TIGHT), off) is None


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


DEALT = replace(TWO_STAGES, schedule="interleaved", chunks=2)
UNEVEN = replace(DEALT, pipelines=(Pipeline((Stage((0,), blocks=4), Stage((1,), blocks=2)), micro_batches=4),))
THREE = replace(DEALT, pipelines=(Pipeline(tuple(Stage((i,), blocks=2) for i in range(3)), micro_batches=3),))

WAITING = replace(UNEVEN, schedule="zero-bubble")

GRID = Plan((Pipeline((Stage((0, 1, 2, 3), (3, 1), blocks=6, context=2),), micro_batches=4),))


def recomputing(plan: Plan, counts: tuple[int, ...]) -> Plan:
    (pipeline,) = plan.pipelines
    stages = tuple(stage.recomputing(count) for stage, count in zip(pipeline.stages, counts, strict=True))
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


@pytest.mark.parametrize(
    "plan", [DEALT, UNEVEN, THREE, WAITING, GRID], ids=["groups", "uneven", "three", "zero bubble", "grid"]
)
@pytest.mark.parametrize("are_alike", [True, False], ids=["blocks alike", "blocks that differ"])
def test_plans_in_chunks_and_grids_recompute_what_lets_them_fit_in_least_time(plan: Plan, are_alike: bool) -> None:
    """Whatever memory there is, no other counts of blocks for its stages fit and take less."""
    costs = COSTS if are_alike else rising(COSTS)
    options, counts = PlanOptions(memory_fraction=1.0), [range((s.blocks or 0) + 1) for *_, s in plan.stages]
    every = [recomputing(plan, chosen) for chosen in product(*counts)]
    ample = paper(*(1.0,) * len(plan.devices))
    needed = {one: max(d.total_bytes for d in predict(one, costs, ample).devices) for one in every}
    seconds = {one: PricedStep(one, costs, ample).overlapped_seconds for one in every}
    chosen = set()
    for limit in sorted(set(needed.values())):
        found = fit_recompute(plan, costs, paper(*(1.0,) * len(plan.devices), memory_bytes=limit), options)
        assert found is not None
        assert needed[found.plan] <= limit
        assert found.overlapped_seconds == min(seconds[one] for one, size in needed.items() if size <= limit)
        chosen.add(tuple(recomputed(found.plan)))
    assert len(chosen) > 2
    least = paper(*(1.0,) * len(plan.devices), memory_bytes=min(needed.values()) - 1)
    assert fit_recompute(plan, costs, least, options) is None


def test_the_planner_finds_what_pipelines_in_chunks_recompute() -> None:
    """In chunks a pipeline keeps more micro-batches, so that what it recomputes as a whole is not enough."""
    costs = transformer(layers=16, rows=4, length=256, width=256, units=1)
    memory, link = int(2.0 * costs.whole.parameter_bytes), Link(1e9, 1e-5)
    cluster = paper(1, 1, 1, 1, memory_bytes=memory, nodes="abcd", inter=link)
    plan = make_plan(costs, cluster, options=PlanOptions(forbidden=("zero_3",)))  # which is faster
    assert plan.chunks > 1
    assert plan.predicted is not None
    assert not memory_problems(plan.predicted, cluster, OPTIONS.memory_fraction)
    whole = fit_recompute(replace(plan, schedule="1f1b", chunks=1), costs, cluster, OPTIONS)
    assert whole is not None
    assert simulated_seconds(whole.plan, costs, cluster) > 1.1 * plan.predicted.seconds
    assert sum(recomputed(whole.plan)) < sum(recomputed(plan))
    as_before = replace(plan, pipelines=whole.plan.pipelines)
    assert memory_problems(predict(as_before, costs, cluster), cluster, OPTIONS.memory_fraction)
