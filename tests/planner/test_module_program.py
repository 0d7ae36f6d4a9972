import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.module_program import ModuleProgram
from tests.switching.eager.models import Choosy, make


def test_rows_are_shared_out_in_proportion_to_speed() -> None:
    program = ModuleProgram(make(Choosy))
    planned = program.at(program.costs(8))
    cluster = Cluster.on_paper((8e9, 4e9, 2e9, 2e9))
    plan = planned.plan(cluster, "auto")
    assert [(p.devices, p.share) for p in plan.pipelines] == [((0,), 4), ((1,), 2), ((2,), 1), ((3,), 1)]
    slowed = planned.plan(cluster.with_rates({0: 4.0}), "slowed")
    assert slowed.pipelines[0].share < plan.pipelines[0].share
    assert plan.predicted is not None


def test_a_model_too_large_for_a_device_is_not_planned() -> None:
    program = ModuleProgram(make(Choosy))
    with pytest.raises(PlanError, match="whole model on every device"):
        program.at(program.costs(8)).plan(Cluster.on_paper((1e9, 1e9), memory_bytes=(1000, 1000)), "auto")
