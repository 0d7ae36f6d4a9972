import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.simulate.pipeline import PipelineLane
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Pipeline, Plan, Stage, split_rows
from hetu_fx.plans.schedule import Phase
from tests.planner.examples import paper, transformer

PIPELINE = Pipeline((Stage((0,), blocks=5), Stage((1, 2), blocks=3)))


def lane(chunks: int = 1) -> PipelineLane:
    plan = Plan((PIPELINE,), schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
    costs = transformer(layers=8)
    return PipelineLane.of(plan, 0, split_rows(costs.rows, plan)[0][0], costs, paper(4, 2, 1))


def test_chunks_deal_blocks_out_round_by_round() -> None:
    found = lane(2)
    assert [costs.stage.devices for costs in found.costs] == [(0,), (1, 2), (0,), (1, 2)]
    assert found.stages == ((0,), (1, 2))
    assert found.devices == (0, 1, 2)


def test_more_chunks_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"has \[5, 3\] blocks, fewer than 4 chunks per stage"):
        lane(4)


def test_both_halves_of_a_backward_take_as_long_as_the_whole() -> None:
    found = lane()
    seconds = {work: found.compute(1, work, 2) for work in Phase}
    halves = seconds[Phase.INPUT_GRADIENT][1] + seconds[Phase.WEIGHT_GRADIENT][1]
    assert halves == pytest.approx(seconds[Phase.BACKWARD][1])
    assert seconds[Phase.FORWARD][2] > seconds[Phase.FORWARD][1] > 0
    assert found.reductions(1, Phase.BACKWARD, 2) == found.reductions(1, Phase.INPUT_GRADIENT, 2)
    assert found.reductions(1, Phase.WEIGHT_GRADIENT, 2) == Line()


def test_work_falls_on_blocks_in_proportion() -> None:
    weights = lane().weights(1, [(7, 8), (5, 7)])
    assert sum(weights) == pytest.approx(1)
    assert lane().weights(0, [(4, 5), (3, 4)])[0] == pytest.approx(0.5)
