import random

from benchmarks.cases.drawn_plans import KINDS, Draw, kind_of
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.device_orders import Space
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from tests.planner.examples import paper, transformer

CLUSTER = paper(8, 4, 2, 2)
NET = ProgramCosts(16, PartCosts(flops=4e9, parameter_bytes=1e8), (), PartCosts(), units=3)


def drawn(costs: ProgramCosts, *, mixes_rows: bool = False, cluster: Cluster = CLUSTER) -> list[Plan]:
    space = Space.of(costs, cluster, PlanOptions.of_program(mixes_rows=mixes_rows))
    speeds = [device.speed for device in cluster.devices]
    return Draw(speeds, space, costs.units, costs.num_blocks, costs.rows, random.Random(0)).plans(20)


def test_plans_are_different_of_all_kinds_and_fit_the_program() -> None:
    costs = transformer()
    plans = drawn(costs)
    assert len(set(plans)) == len(plans) == 20
    assert {kind_of(plan) for plan in plans} == set(KINDS)
    for plan in plans:
        plan.check(num_blocks=costs.num_blocks, world_size=4)
        assert predict(plan, costs, CLUSTER).seconds > 0
        assert all(sum(stage.ratios) <= costs.units for *_, stage in plan.stages)


def test_the_same_are_drawn_again() -> None:
    assert drawn(transformer()) == drawn(transformer())


def test_a_program_in_which_rows_meet_gets_no_stages_and_no_micro_batches() -> None:
    plans = drawn(NET, mixes_rows=True)
    assert all(len(p.stages) == 1 and p.micro_batches == 1 for plan in plans for p in plan.pipelines)
    assert max(len(stage.devices) for plan in plans for *_, stage in plan.stages) == 3
