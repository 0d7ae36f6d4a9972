import math
from dataclasses import replace

import pytest

from hetu_fx.base.words import format_used_bytes
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.cluster.devices import FLOPS_PER_BYTE
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.link_load import hand_over_line
from hetu_fx.planner.price.stage_seconds import GATHER, SUM, pipeline_seconds, stage_costs
from hetu_fx.planner.price.step import TERMS, memory_problems, predict
from hetu_fx.planner.price.step_end import TURN_MOVES, sync_seconds
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import FAST_LINK, paper, parted, transformer

FOUR_BLOCKS = transformer(layers=4, rows=8)
SLOW_LINK = Link(1e6, 1e-3)
PIPELINE = Pipeline((Stage((0,), blocks=3), Stage((1,), blocks=1)), micro_batches=4)


def test_a_pipeline_fills_drains_and_waits_for_its_slowest_stage() -> None:
    lines = [Line(0.0, 1.0), Line(1.0, 2.0)]
    assert pipeline_seconds(lines, 8, 4) == (2 + 5) + 3 * 5
    assert pipeline_seconds(lines, 3, 8) == (1 + 3) + 2 * 3  # no more micro-batches than rows
    assert pipeline_seconds(lines, 0, 4) == 0.0


def test_a_group_that_shares_the_sequence_holds_less_and_sums_as_much() -> None:
    plan, cluster = Plan.tensor_parallel((0, 1), (2, 2)), paper(5, 5)
    plain, shared = (
        predict(replace(plan, sequence_parallel=on), transformer(), cluster).devices[0] for on in (False, True)
    )
    assert dict(shared.bytes)["activations"] < dict(plain.bytes)["activations"]
    assert dict(shared.seconds)["compute"] < dict(plain.seconds)["compute"]
    assert dict(shared.seconds)["tensor_parallel"] == dict(plain.seconds)["tensor_parallel"]


def test_devices_that_share_the_sequence_cut_all_work_and_hold_all_parameters() -> None:
    block = replace(transformer().blocks[0], gathered_bytes=1000.0, num_gathers=2)
    costs, cluster = ProgramCosts(16, PartCosts(), (block,), PartCosts()), paper(1, 1)
    stage = Stage((0, 1), (3, 1), 1, context=2)
    (priced,) = stage_costs(parted(Pipeline((stage,)), costs), costs, cluster)
    first, second = priced.compute
    assert first.slope == pytest.approx(3 * second.slope)
    assert priced.tensor_parallel.fixed == pytest.approx(2 * 2 * FAST_LINK.latency_seconds)
    assert priced.tensor_parallel.slope == pytest.approx(2 * 500 / 1e10)
    held = [dict(d.bytes) for d in predict(Plan((Pipeline((stage,)),)), costs, cluster).devices]
    assert [d["copies"] for d in held] == [block.parameter_bytes] * 2
    assert [d["optimizer"] for d in held] == [block.parameter_bytes] * 2  # two moments of a half
    kept = block.activation_bytes - 1000
    assert [d["activations"] for d in held] == [math.ceil(16 * (1000 + share * kept)) for share in (0.75, 0.25)]
    synced = [dict(d.seconds)["gradient_sync"] for d in predict(Plan((Pipeline((stage,)),)), costs, cluster).devices]
    assert min(synced) > 0


def test_a_grid_sums_in_its_tensor_groups_and_gathers_between_them() -> None:
    block = replace(transformer().blocks[0], gathered_bytes=1000.0, num_gathers=2)
    costs, cluster = ProgramCosts(16, PartCosts(), (block,), PartCosts()), paper(1, 1, 1, 1)
    stage = Stage((0, 1, 2, 3), (2, 1), 1, context=2, context_ratios=(3, 1))
    (priced,) = stage_costs(parted(Pipeline((stage,)), costs), costs, cluster)
    flops = [block.flops_at(tensor) * context for context, tensor in stage.shares]
    assert priced.compute[0].slope > priced.compute[1].slope > priced.compute[3].slope
    assert [line.slope for line in priced.compute] >= [3 * count / 1e9 for count in flops]
    # gathers of two thirds of the heads in each direction, sums of three quarters of the tokens
    (gathers, _), (sums, _) = ([r for r in priced.rounds if r.kind == kind] for kind in (GATHER, SUM))
    assert (gathers.ranks, gathers.forward) == ((0, 2), pytest.approx(1000 * 2 / 3))
    assert (sums.ranks, sums.forward) == ((0, 1), pytest.approx(block.reduced_bytes * 3 / 4))
    latency = 2 * block.num_reductions + 2
    assert priced.sums.fixed == pytest.approx(latency * FAST_LINK.latency_seconds)
    assert priced.sums.slope == pytest.approx((gathers.forward / 2 + sums.forward) / 1e10)
    devices = predict(Plan((Pipeline((stage,)),)), costs, cluster).devices
    synced = [dict(device.seconds)["gradient_sync"] for device in devices]
    assert len(set(synced)) == 1  # a bucket takes all of its devices the same
    assert synced[0] > 0


def test_blocks_that_are_recomputed_keep_little_and_cost_their_forward_once_more() -> None:
    costs, cluster = transformer(layers=4, rows=16), paper(1, 1)
    for kind in ({}, {"context": 2}):
        plain, again = (
            predict(Plan((Pipeline((Stage((0, 1), (3, 1), 4, **kind, recompute=n),)),)), costs, cluster).devices[0]
            for n in (0, 3)
        )
        work, more = (dict(device.seconds)["compute"] for device in (plain, again))
        ends = costs.before + costs.after
        least = sum(block.flops_at(0.75) for block in costs.blocks[:3]) * 16 / 1e9
        assert least < more - work < work / 3
        assert ends.flops > 0
        kept, left = (dict(device.bytes)["activations"] for device in (plain, again))
        assert 0.25 * kept < left < 0.75 * kept
        assert dict(plain.seconds)["tensor_parallel"] == dict(again.seconds)["tensor_parallel"]


def test_stages_pay_for_what_they_send() -> None:
    first, last = stage_costs(parted(PIPELINE, transformer()), transformer(), paper(1, 1))
    assert first.to_previous == last.to_next == Line()
    assert first.to_next == last.to_previous
    assert first.to_next.slope == pytest.approx(4 * 64 * 64 / 1e10)


def test_every_device_accounts_for_the_whole_step() -> None:
    plan = Plan((replace(PIPELINE, share=3), Pipeline((Stage((2, 3), (3, 1), 4),))))
    prediction = predict(plan, transformer(), paper(8, 4, 2, 2))
    assert [device.rank for device in prediction.devices] == [0, 1, 2, 3]
    for device in prediction.devices:
        assert [term for term, _ in device.seconds] == list(TERMS)
    busiest = min(prediction.devices, key=lambda device: dict(device.seconds)["idle"])
    assert math.isclose(busiest.total_seconds, prediction.seconds)
    assert f"bound by device {busiest.rank}: compute" in prediction.why


def test_one_device_has_nothing_to_communicate() -> None:
    (device,) = predict(Plan.single(), transformer(), paper(5)).devices
    seconds = dict(device.seconds)
    assert [seconds[t] for t in ("tensor_parallel", "hand_over", "idle", "gradient_sync", "gather")] == pytest.approx(
        [0] * 5
    )


def test_doubling_a_replica_halves_compute_and_adds_sync() -> None:
    costs, cluster = transformer(), paper(5, 5)
    one = dict(predict(Plan.single(), costs, cluster).devices[0].seconds)
    two = dict(predict(Plan.data_parallel([0, 1]), costs, cluster).devices[0].seconds)
    assert two["compute"] == pytest.approx(one["compute"] / 2, rel=0.2)
    assert two["gradient_sync"] > one["gradient_sync"] == 0


def test_zero_changes_memory_and_leaves_the_bytes_on_the_wire() -> None:
    costs, cluster = transformer(), paper(5, 5)
    spread = predict(Plan.data_parallel([0, 1]), costs, cluster).devices[0]
    whole = predict(replace(Plan.data_parallel([0, 1]), zero=0), costs, cluster).devices[0]
    assert dict(spread.bytes)["optimizer"] < dict(whole.bytes)["optimizer"]
    on_the_wire = [dict(d.seconds)["gradient_sync"] + dict(d.seconds)["gather"] for d in (spread, whole)]
    assert on_the_wire[0] == pytest.approx(on_the_wire[1])


def test_a_slow_link_shows_in_the_sync() -> None:
    near = predict(Plan.data_parallel([0, 1]), transformer(), paper(5, 5))
    far = predict(Plan.data_parallel([0, 1]), transformer(), paper(5, 5, nodes="ab", inter=Link(1e6)))
    assert far.seconds > 5 * near.seconds
    assert "gradient sync" in far.why or "gather" in far.why


def test_memory_problems_name_device_need_and_limit() -> None:
    prediction = predict(Plan.single(), transformer(), paper(5))
    need = prediction.devices[0].total_bytes
    assert memory_problems(prediction, paper(5, memory_bytes=need)) == ()
    (line,) = memory_problems(prediction, paper(5, memory_bytes=need), 0.5)
    assert line == f"device 0 needs {format_used_bytes(need, need // 2)}"


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="add up to 4, but the model has 5"):
        predict(Plan((PIPELINE,)), transformer(layers=5), paper(1, 1))


def test_a_replica_without_rows_only_syncs() -> None:
    costs = transformer(rows=1)
    idle = predict(Plan.data_parallel([0, 1], [9, 1]), costs, paper(5, 5)).devices[1]
    assert dict(idle.seconds)["compute"] == 0
    assert dict(idle.bytes)["activations"] == 0


def test_a_step_takes_what_it_takes_besides_on_the_slowest_host_of_the_plan() -> None:
    empty = ProgramCosts(2, PartCosts(), (), PartCosts())
    given = paper(1, 1, 1)
    slow = replace(given, devices=tuple(replace(d, step_seconds=0.1 + d.rank) for d in given.devices))
    cluster = slow.with_rates({1: 2.0, 2: 9.0})
    assert predict(Plan.single(), empty, cluster).seconds == pytest.approx(0.1)
    pair = Plan.data_parallel([0, 1])
    assert predict(pair, empty, cluster).seconds - predict(pair, empty, given).seconds == pytest.approx(2.2)


def test_what_a_step_takes_on_a_host_passes_while_others_compute() -> None:
    costs, plan = transformer(rows=4), Plan.data_parallel([0, 1], [1, 3])
    cluster = paper(1e3, 1e3)
    plain, late = predict(plan, costs, cluster), predict(plan, costs, _with_host_seconds(cluster, 0, 2e-4))
    assert late.seconds == plain.seconds
    assert [dict(d.seconds)["host"] for d in late.devices] == [2e-4, 0]
    assert [dict(d.seconds)["idle"] for d in late.devices] == pytest.approx(
        [dict(plain.devices[0].seconds)["idle"] - 2e-4, 0], abs=1e-12
    )
    busy = predict(plan, costs, _with_host_seconds(cluster, 1, 2e-4))
    assert busy.seconds == pytest.approx(plain.seconds + 2e-4)


def _with_host_seconds(cluster: Cluster, rank: int, seconds: float) -> Cluster:
    devices = tuple(replace(d, step_seconds=seconds) if d.rank == rank else d for d in cluster.devices)
    return replace(cluster, devices=devices)


def test_a_program_without_work_takes_no_time() -> None:
    empty = ProgramCosts(1, PartCosts(), (), PartCosts())
    assert predict(Plan.single(), empty, paper(1)).seconds == 0


def test_a_hand_over_and_a_gradient_sync_wait_for_the_later_end() -> None:
    on_time, late = (
        Cluster.on_paper([1e9] * 3, intra=FAST_LINK, meeting_seconds=lost) for lost in ([0.0] * 3, [1e-3, 5e-3, 0.0])
    )
    stages = Stage((0,)), Stage((1,))
    lines = [hand_over_line(*stages, 100.0, cluster) for cluster in (on_time, late)]
    assert lines[1].fixed - lines[0].fixed == pytest.approx(5e-3)
    assert lines[1].slope == lines[0].slope
    for zero, lost in ((0, (1e-2, 0.0)), (1, (5e-3, 5e-3))):
        pairs = zip(*(sync_seconds(100.0, (0, 1, 2), cluster, zero) for cluster in (late, on_time)), strict=True)
        assert [one - other for one, other in pairs] == pytest.approx(list(lost))
    assert sync_seconds(100.0, (1,), late, 1) == (0.0, 0.0)


def test_what_is_synced_is_copied_on_the_slowest_device_in_every_turn() -> None:
    cluster = Cluster.on_paper([4e9, 1e9], intra=Link(1e30))
    copied = 8e6 * TURN_MOVES * FLOPS_PER_BYTE / 1e9
    assert sync_seconds(8e6, (0, 1), cluster, 1) == (pytest.approx(copied), pytest.approx(copied))
    assert sync_seconds(8e6, (0, 1), cluster, 0) == (pytest.approx(2 * copied), 0.0)


def pipeline(*stages: tuple[tuple[int, ...], int]) -> Pipeline:
    return Pipeline(tuple(Stage(devices, blocks=blocks) for devices, blocks in stages))


def test_stages_sync_inside_their_node_where_those_that_hold_the_same_stand_there() -> None:
    plan = Plan((pipeline(((0,), 2), ((1,), 2)), pipeline(((2,), 2), ((3,), 2))))
    within, across = (paper(1, 1, 1, 1, nodes=nodes, inter=SLOW_LINK) for nodes in ("abab", "aabb"))
    first, last = (FOUR_BLOCKS.stage(*blocks).parameter_bytes for blocks in ((0, 2), (2, 4)))
    found = []
    for cluster in (within, across):
        (device,) = (d for d in predict(plan, FOUR_BLOCKS, cluster).devices if d.rank == 1)
        found.append(dict(device.seconds)["gradient_sync"])
    assert found[0] == sync_seconds(last, (1, 3), within, 1)[0]
    # the rings of both stages share the link between the nodes
    assert found[1] == pytest.approx((first + last) / 2 / across.inter.bytes_per_second, rel=0.01)
    assert predict(plan, FOUR_BLOCKS, within).seconds < predict(plan, FOUR_BLOCKS, across).seconds


def test_every_replica_does_work_on_gathered_rows_whole() -> None:
    work = PartCosts(flops=1e9)
    costs = ProgramCosts(8, PartCosts(flops=2e9), (), work, gathered_work=work)
    plan, cluster = Plan.data_parallel((0, 1), (3, 1)), paper(3, 1)
    seconds = [dict(device.seconds)["compute"] for device in predict(plan, costs, cluster).devices]
    assert seconds == pytest.approx([3 * (6 * 2e9 + 8 * 1e9) / 3e9, 3 * (2 * 2e9 + 8 * 1e9) / 1e9])
    alone = dict(predict(Plan.single(0), costs, cluster).devices[0].seconds)["compute"]
    assert alone == pytest.approx(3 * 8 * 3e9 / 3e9), "one replica has all rows anyway"


def test_a_group_shares_of_work_on_gathered_rows_what_it_shares_of_others() -> None:
    work = PartCosts(flops=1e9, split_flops=1e9)
    costs = ProgramCosts(8, PartCosts(), (), work, units=2, gathered_work=work)
    plan = Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),))))
    seconds = [dict(device.seconds)["compute"] for device in predict(plan, costs, paper(1, 1, 1)).devices]
    assert seconds == pytest.approx([3 * 8 * 0.5, 3 * 8 * 0.5, 3 * 8])
