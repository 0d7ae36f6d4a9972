import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.simulate.jobs import Jobs
from hetu_fx.planner.simulate.simulate import PipelineJobs, PipelineLane, simulate
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.planner.values.exchanged_values import TiedParameter
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage, split_rows
from hetu_fx.plans.schedule import Phase
from hetu_fx.show.timeline import Event
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


WORK = ("forward", "backward", "input gradient", "weight gradient")


def blocks_only(layers: int, rows: int) -> ProgramCosts:
    """Return a program of equal blocks that costs nothing but compute: a second a row and block at 3 GFLOP/s."""
    empty, block = PartCosts(), PartCosts(flops=1e9, split_flops=1e9)
    return ProgramCosts(rows, empty, (block,) * layers, empty, (0.0,) * (layers - 1), units=4)


def free(*speeds: float) -> Cluster:
    """Return devices whose links cost nothing to speak of."""
    return replace(paper(*speeds), intra=Link(1e30), inter=Link(1e30))


def pipeline(*devices: int, micro_batches: int = 1, rows: int = 1) -> Pipeline:
    return Pipeline(tuple(Stage((device,)) for device in devices), share=rows, micro_batches=micro_batches)


def events(step: Simulation, *kinds: str, device: int | None = None) -> list[Event]:
    return [e for e in step.timeline.events if e.kind in kinds and device in (None, e.device)]


def work_seconds(step: Simulation) -> float:
    """Return the time from the first forward to the last backward."""
    own = events(step, *WORK)
    return max(e.end_seconds for e in own) - min(e.start_seconds for e in own)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 8), (4, 4), (4, 12)])
def test_equal_stages_take_the_textbook_time(schedule: Schedule, stages: int, micro_batches: int) -> None:
    plan = Plan((pipeline(*range(stages), micro_batches=micro_batches),), schedule=schedule)
    step = simulate(plan, blocks_only(stages, micro_batches), free(*[3.0] * stages))
    assert work_seconds(step) == pytest.approx(micro_batches + stages - 1)
    share = (stages - 1) / (micro_batches + stages - 1)
    assert list(step.bubbles.values()) == pytest.approx([share] * stages)


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", 1, 8 + 3),
        ("interleaved", 2, 8 + 3 / 2),
        ("zero-bubble", 1, 8 + 3 / 3),
        ("zero-bubble", 2, 8 + 3 / 3 / 2),
    ],
)
def test_chunks_and_weights_that_wait_make_bubbles_smaller(schedule: Schedule, chunks: int, expected: float) -> None:
    plan = Plan((pipeline(*range(4), micro_batches=8),), schedule=schedule, chunks=chunks)
    step = simulate(plan, blocks_only(4 * 2, 8), free(*[6.0] * 4))
    assert work_seconds(step) == pytest.approx(expected, rel=0.03)


def test_one_device_after_the_other_is_what_the_cost_model_says() -> None:
    for plan in (Plan.single(), Plan.tensor_parallel((0, 1)), Plan((pipeline(0, 1),))):
        costs, cluster = transformer(), paper(2, 2)
        assert simulate(plan, costs, cluster).seconds == pytest.approx(predict(plan, costs, cluster).seconds, rel=1e-3)


def test_an_even_pipeline_is_what_the_cost_model_says() -> None:
    plan, costs, cluster = Plan((pipeline(0, 1, micro_batches=4),)), transformer(vocabulary=1), paper(2, 2)
    assert simulate(plan, costs, cluster).seconds == pytest.approx(predict(plan, costs, cluster).seconds, rel=0.03)


def test_what_waits_for_nobody_is_faster_than_the_formula_which_charges_the_largest() -> None:
    plan = Plan((pipeline(0, 1, 2, micro_batches=4),))
    costs, cluster = transformer(layers=6, rows=9), paper(8, 1, 4)
    assert simulate(plan, costs, cluster).seconds < predict(plan, costs, cluster).seconds


def test_a_straggler_holds_up_its_pipeline() -> None:
    plan, costs = Plan((pipeline(0, 1, micro_batches=8),)), blocks_only(2, 8)
    slow = simulate(plan, costs, free(3.0, 3.0).with_rates({1: 2.0}))
    assert work_seconds(slow) == pytest.approx(8 * 2 + 1)
    assert slow.bubbles[0] == pytest.approx(1 - 8 / 17)


def test_the_slowest_of_a_group_sets_its_pace() -> None:
    step = simulate(Plan.tensor_parallel((0, 1)), blocks_only(2, 4), free(3.0, 1.5))
    assert step.bubbles[1] == pytest.approx(0.0, abs=1e-6)
    assert step.bubbles[0] == pytest.approx(0.5, abs=1e-6)


def test_a_message_delays_the_receiver_and_not_the_sender() -> None:
    costs = replace(blocks_only(2, 2), boundary_bytes=(1e9,))
    cluster = replace(paper(3.0, 3.0), intra=Link(2e9))
    step = simulate(Plan((pipeline(0, 1, micro_batches=2),)), costs, cluster)
    ends = {e.name: e for e in events(step, "forward", device=0)}
    assert ends["forward 1"].start_seconds == ends["forward 0"].end_seconds
    (first, _) = events(step, "forward", device=1)
    assert first.start_seconds == pytest.approx(ends["forward 0"].end_seconds + 0.5)


def test_gradients_travel_beside_the_backward_of_earlier_blocks() -> None:
    block = PartCosts(flops=1e9, parameter_bytes=float(20 << 20))
    costs = ProgramCosts(2, PartCosts(), (block,) * 4, PartCosts(), (0.0,) * 3)
    cluster = replace(paper(3.0, 3.0), intra=Link(40 << 20))
    step = simulate(Plan.data_parallel((0, 1)), costs, cluster)
    sync = events(step, "gradients", device=0)
    backward_end = max(e.end_seconds for e in events(step, "backward"))
    assert len(sync) == 4
    assert sync[0].start_seconds < backward_end
    assert [e for e in sync if e.end_seconds > backward_end] == [sync[-1]]
    assert max(e.end_seconds for e in sync) <= min(e.start_seconds for e in events(step, "optimizer"))


def test_bytes_of_gradients_and_parameters_go_around_the_ring_once_each() -> None:
    step = simulate(Plan.data_parallel((0, 1, 2)), transformer(), paper(1, 1, 1))
    each = transformer().whole.parameter_bytes * 2 / 3
    assert step.link_bytes == pytest.approx({(0, 1): 2 * each, (1, 2): 2 * each, (2, 0): 2 * each})


def test_devices_that_share_the_sequence_gather_in_every_block_and_send_all_gradients_home() -> None:
    costs = transformer()
    shared = replace(costs, blocks=tuple(replace(block, gathered_bytes=1e4, num_gathers=2) for block in costs.blocks))
    step = simulate(Plan.context_parallel((0, 1)), shared, paper(1, 1))
    around = 4 * 16 * 1e4 / 2  # in each of the blocks, for all rows, a half from each device
    assert step.link_bytes == pytest.approx(dict.fromkeys([(0, 1), (1, 0)], 2 * around + costs.whole.parameter_bytes))
    assert {e.kind for e in step.timeline.events} >= {"gather", "communication", "gradients"}


def test_tied_parameters_travel_once_between_replicas_and_between_the_stages_that_read_them() -> None:
    costs = transformer()
    table = costs.before.parameter_bytes
    tied = replace(costs, after=replace(costs.after, parameter_bytes=0.0), tied=(TiedParameter(table, 0.0, (0, 5)),))
    replicas = simulate(Plan.data_parallel((0, 1)), tied, paper(1, 1)).link_bytes
    assert replicas[0, 1] == pytest.approx(tied.whole.parameter_bytes)
    plan = Plan((pipeline(0, 1, micro_batches=4),))
    together, apart = (simulate(plan, one, paper(1, 1)) for one in (tied, costs))
    for link in ((0, 1), (1, 0)):
        assert together.link_bytes[link] - apart.link_bytes[link] == pytest.approx(table)
    ends = [dict(device.seconds) for device in predict(plan, tied, paper(1, 1)).devices]
    assert all(seconds["gradient_sync"] > 0 < seconds["gather"] for seconds in ends)


def test_replicas_that_share_a_slow_link_between_nodes_wait_for_it() -> None:
    block = PartCosts(flops=1.0, split_flops=1.0, parameter_bytes=1e7, split_parameter_bytes=1e7)
    costs = ProgramCosts(4, PartCosts(), (block,), PartCosts(), units=4)
    cluster = paper(*[3e4] * 4, nodes="abab", inter=Link(1e7))
    pairs = Plan((Pipeline((Stage((0, 2)),)), Pipeline((Stage((1, 3)),))))
    lone = Plan.data_parallel((0, 1))
    # two rings of half the bytes use the nodes' one link as long as one ring of all
    two, one = (events(simulate(plan, costs, cluster), "gather")[0].seconds for plan in (pairs, lone))
    assert two == pytest.approx(one, rel=1e-4)


def test_a_replica_without_rows_waits() -> None:
    step = simulate(Plan.data_parallel([0, 1], [9, 1]), transformer(rows=1), paper(1, 1))
    assert {event.kind for event in step.timeline.of(1)} == {"gather", "gradients", "optimizer"}


PLANS = {
    "one": Plan.single(),
    "replicas": Plan.data_parallel((0, 1), (3, 1)),
    "group": Plan.tensor_parallel((0, 1), (3, 1)),
    "1f1b": Plan((pipeline(0, 1, micro_batches=8),)),
    "gpipe": Plan((pipeline(0, 1, micro_batches=8),), schedule="gpipe"),
    "interleaved": Plan((pipeline(0, 1, micro_batches=4),), schedule="interleaved"),
    "zero bubble in chunks": Plan((pipeline(0, 1, micro_batches=4),), schedule="zero-bubble", chunks=2),
    "interleaved beside one": Plan(
        (pipeline(0, 1, micro_batches=4), Pipeline((Stage((2,)),))), schedule="interleaved", zero=0
    ),
    "unequal": Plan((pipeline(0, 1, micro_batches=4, rows=3), Pipeline((Stage((2, 3)),)))),
    "sequence": replace(Plan.tensor_parallel((0, 1), (3, 1)), sequence_parallel=True),
    "ring": Plan.context_parallel((0, 1), (3, 1)),
    "ring without zero": replace(Plan.context_parallel((0, 1), (3, 1)), zero=0),
    "grid": Plan((Pipeline((Stage((0, 1, 2, 3), (3, 1), context=2, context_ratios=(2, 1), recompute=1),)),)),
    "ring beside one": Plan((Pipeline((Stage((0, 1), context=2),)), Pipeline((Stage((2,)),)))),
}


@pytest.mark.parametrize("name", PLANS)
def test_memory_over_time_is_as_high_as_the_memory_model_says(name: str) -> None:
    costs, cluster = transformer(), paper(2, 2, 1, 1)
    step, predicted = simulate(PLANS[name], costs, cluster), predict(PLANS[name], costs, cluster)
    for device in predicted.devices:
        assert step.peak_bytes[device.rank] == pytest.approx(device.total_bytes, rel=0.05)


def test_memory_goes_back_to_where_it_was() -> None:
    for counter in simulate(PLANS["unequal"], transformer(), paper(2, 2, 1, 1)).timeline.counters:
        assert counter.values[-1][1] == pytest.approx(counter.values[0][1])


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("zero-bubble", 2)]),
)
def test_a_step_is_complete_causal_and_bounded(speeds: list[int], rounds: int, how: tuple[Schedule, int]) -> None:
    stages, micro_batches, (schedule, chunks) = len(speeds), rounds * len(speeds), how
    plan = Plan((pipeline(*range(stages), micro_batches=micro_batches),), schedule=schedule, chunks=chunks)
    costs = blocks_only(2 * stages, micro_batches)
    step = simulate(plan, costs, free(*map(float, speeds)))
    for device in range(stages):
        own = sorted(events(step, *WORK, device=device), key=lambda e: e.start_seconds)
        assert all(a.end_seconds <= b.start_seconds + 1e-9 for a, b in itertools.pairwise(own))
        assert sum(e.seconds for e in own) == pytest.approx(micro_batches * 2 * 3 / speeds[device])
    each = [2 * 3 / speed for speed in speeds]
    assert micro_batches * max(each) - 1e-6 <= work_seconds(step) <= micro_batches * sum(each) + 1e-6


def test_sums_take_what_products_do_not_hide_and_all_their_bytes_travel() -> None:
    """As the formula has it; recomputed blocks hide nothing in the forward, gradients made later nothing at all."""
    sums = dict(reduced_bytes=1e4, num_reductions=1, returned_bytes=1e4, num_returns=1)
    hidden = dict(summed_flops=2e6, summed_bytes=1e4, num_summed=1, beside_flops=1e6, beside_bytes=1e4, num_beside=1)
    cluster = Cluster.on_paper([1e8] * 2, nodes=("a", "b"), intra=Link(1e6), inter=Link(1e6))

    def told(schedule: Schedule = "1f1b", recompute: int = 0, **more: float) -> tuple[float, float, float]:
        block = PartCosts(flops=4e6, split_flops=4e6, **sums, **more)  # type: ignore[arg-type]
        costs = ProgramCosts(64, PartCosts(), (block,), PartCosts())
        plan = Plan((Pipeline((Stage((0, 1), blocks=1, recompute=recompute),), micro_batches=2),), schedule=schedule)
        step = simulate(plan, costs, cluster)
        return step.seconds, predict(plan, costs, cluster).seconds, sum(step.sent_bytes.values())

    (alone, _, sent), (beside, priced, still_sent) = told(), told(**hidden)
    assert beside == pytest.approx(priced)
    assert beside < 0.9 * alone
    assert still_sent == pytest.approx(sent)
    assert told(recompute=1, **hidden)[0] == pytest.approx(told(recompute=1, **hidden)[1])
    assert told("zero-bubble", **hidden)[0] == pytest.approx(told("zero-bubble")[0])


def test_every_replica_does_work_on_gathered_rows_whole() -> None:
    work = PartCosts(flops=1e9)
    costs = ProgramCosts(8, PartCosts(flops=2e9), (), work, gathered_work=work)
    plan = Plan((pipeline(0, rows=3), pipeline(1, rows=1)))
    assert simulate(plan, costs, free(3, 1)).seconds == pytest.approx(3 * (2 * 2e9 + 8 * 1e9) / 1e9)
