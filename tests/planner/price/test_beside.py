"""What sums hide that travel beside products: by slices in the forward, by gradients of weights in the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.price.beside import overlap_sums
from hetu_fx.planner.price.stage_seconds import StageCosts, stage_costs
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import parted

ROWS = 64
SENT = PartCosts(
    flops=4e6,
    split_flops=4e6,
    reduced_bytes=1e4,
    num_reductions=1,
    returned_bytes=1e4,
    num_returns=1,
    summed_flops=2e6,
    summed_bytes=1e4,
    num_summed=1,
    beside_flops=1e6,
    beside_bytes=1e4,
    num_beside=1,
)
GROUP = Stage((0, 1), blocks=1)


def cluster(speed: float, *, nodes: tuple[str, str] = ("a", "b")) -> Cluster:
    return Cluster.on_paper([speed] * 2, nodes=nodes, intra=Link(1e6), inter=Link(1e6))


def priced(at: Cluster, part: PartCosts = SENT, stage: Stage = GROUP, schedule: str = "1f1b") -> tuple[StageCosts, ...]:
    """Return what a stage takes one thing after the other, and with what it hides."""
    costs = ProgramCosts(ROWS, PartCosts(), (part,), PartCosts())
    (alone,) = stage_costs(parted(Pipeline((stage,)), costs), costs, at)
    return alone, overlap_sums(alone, ROWS, schedule, at)  # type: ignore[arg-type]


def test_of_a_sum_that_takes_longer_its_product_is_hidden_but_for_a_slice() -> None:
    alone, beside = priced(cluster(1e8))
    product, sent = ROWS * 2e6 / 2 / 1e8, alone.sums(ROWS)
    assert sent == pytest.approx(ROWS * 1e4 / 1e6)
    assert product == pytest.approx(sent)
    # eight slices: all that the processor does, and the last slice of the sum, which the products are taken from
    host, slices = 2 * ROWS * 1e4 / 1.1e9, 8
    assert beside.sums(ROWS) == pytest.approx(sent / slices + host + slices * 1e-3, rel=1e-6)


def test_of_the_backwards_sum_what_gradients_of_weights_take_is_hidden() -> None:
    alone, beside = priced(cluster(1e8))
    assert beside.returns(ROWS) == pytest.approx(alone.returns(ROWS) - ROWS * 1e6 / 2 / 1e8)
    _, slow = priced(cluster(1e7))
    assert slow.returns(ROWS) == pytest.approx(2 * ROWS * 1e4 / 1.1e9)  # no more than the processor takes


@pytest.mark.parametrize("speed", [1e10, 1e8])
def test_where_little_can_be_hidden_prices_stay(speed: float) -> None:
    here, none = cluster(speed, nodes=("a", "a")), replace(SENT, num_summed=0, num_beside=0)
    for alone, beside in (priced(here), priced(cluster(speed), none), priced(cluster(speed), schedule="zero-bubble")):
        assert beside.sums(ROWS) == pytest.approx(alone.sums(ROWS))
        assert beside.returns(ROWS) == pytest.approx(alone.returns(ROWS))


def test_blocks_that_are_recomputed_are_not_made_in_slices() -> None:
    alone, beside = priced(cluster(1e8), stage=replace(GROUP, recompute=1))
    assert beside.sums == alone.sums
    assert beside.returns(ROWS) < alone.returns(ROWS)


def test_a_prediction_has_it() -> None:
    costs = ProgramCosts(ROWS, PartCosts(), (SENT,), PartCosts())
    plan = Plan((Pipeline((GROUP,)),))
    terms = dict(predict(plan, costs, cluster(1e8)).devices[0].seconds)
    _, beside = priced(cluster(1e8))
    assert terms["tensor_parallel"] == pytest.approx(beside.tensor_parallel(ROWS))
