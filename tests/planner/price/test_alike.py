from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.price import step
from hetu_fx.planner.price.alike import alike
from hetu_fx.planner.price.fitting import fit_recompute
from hetu_fx.planner.price.step import PricedStep
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=4, rows=12, units=2)
CLUSTER = paper(*[400] * 8, *[100] * 4, nodes="aabbccddeeff", inter=Link(1e9, 1e-5))


def pipeline(*groups: tuple[int, ...], share: int = 1) -> Pipeline:
    return Pipeline(tuple(map(Stage, groups)), share=share, micro_batches=2)


def test_pipelines_are_alike_if_their_devices_and_what_they_share_are() -> None:
    plan = Plan((pipeline((0, 1)), pipeline((2, 3)), pipeline((4, 6)), pipeline((8, 9)), pipeline((5, 7))))
    assert alike(plan, 10, CLUSTER) == (0, 0, 2, 3, 2)
    assert alike(plan, 11, CLUSTER) == (0, 1, 2, 3, 2)  # the first has a row more


def test_rows_and_blocks_tell_pipelines_apart() -> None:
    stages = pipeline((4,), (5,)).stages
    cut = replace(pipeline((4,), (5,)), stages=(replace(stages[0], blocks=1), replace(stages[1], blocks=3)))
    plan = Plan((pipeline((0,), (1,)), pipeline((2,), (3,), share=2), cut))
    assert alike(plan.with_blocks(4), 12, CLUSTER) == (0, 1, 2)


@pytest.mark.parametrize("memory_bytes", [1 << 40, int(0.7 * COSTS.whole.parameter_bytes * 4)])
def test_prices_are_those_of_pipelines_that_are_priced_one_by_one(
    memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = replace(CLUSTER, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in CLUSTER.devices))
    plan = Plan((*(pipeline((i,), (i + 2,)) for i in (0, 1, 4, 5)), pipeline((8, 9), (10, 11))))
    options = PlanOptions(recompute=True)
    together = fit_recompute(plan.with_blocks(4), COSTS, cluster, options)
    monkeypatch.setattr(step, "alike", lambda plan, rows, cluster: tuple(range(len(plan.pipelines))))
    alone = fit_recompute(plan.with_blocks(4), COSTS, cluster, options)
    assert together is not None
    assert alone is not None
    assert together.plan == alone.plan
    assert together.overlapped_seconds == alone.overlapped_seconds
    assert together.prediction == alone.prediction
    assert PricedStep(together.plan, COSTS, cluster).fits(options.memory_fraction)
