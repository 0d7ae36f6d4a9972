import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.simulate.jobs import Jobs
from hetu_fx.planner.simulate.pipeline import PipelineJobs, PipelineLane
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
    seconds = {work: found.costs[1].compute_of(work, 2) for work in Phase}
    halves = seconds[Phase.INPUT_GRADIENT][0] + seconds[Phase.WEIGHT_GRADIENT][0]
    assert halves == pytest.approx(seconds[Phase.BACKWARD][0])
    assert seconds[Phase.FORWARD][1] > seconds[Phase.FORWARD][0] > 0


def test_sums_of_gradients_of_inputs_stand_in_the_half_that_makes_them() -> None:
    sums = {}
    for schedule in ("1f1b", "zero-bubble"):
        jobs = Jobs(paper(4, 2, 1))
        made = PipelineJobs(jobs, lane(), 0, (2, 2), (), {})
        made.run(schedule)
        ends = {number: job.activity.after for number, job in enumerate(jobs.all) if job.task.kind == "communication"}
        after = [jobs.all[number].task for (number,) in ends.values()]
        sums[schedule] = [(task.kind, jobs.all[n].task.alone_seconds) for n, task in zip(ends, after, strict=True)]
    assert {kind for kind, _ in sums["1f1b"]} == {"forward", "backward"}
    assert {kind for kind, _ in sums["zero-bubble"]} == {"forward", "input gradient"}
    assert sorted(seconds for _, seconds in sums["1f1b"]) == sorted(seconds for _, seconds in sums["zero-bubble"])


def test_work_falls_on_blocks_in_proportion() -> None:
    weights = lane().weights(1, [(7, 8), (5, 7)])
    assert sum(weights) == pytest.approx(1)
    assert lane().weights(0, [(4, 5), (3, 4)])[0] == pytest.approx(0.5)
