from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import FLOPS_PER_BYTE
from hetu_fx.cluster.links import TimedGroup, timed_collective
from hetu_fx.cluster.timed import SIZES
from hetu_fx.planner.price.stage_seconds import WEIGHT_MOVES, compute_lines, tensor_parallel_lines
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Stage
from tests.planner.examples import FAST_LINK, paper


def test_compute_is_three_forwards_over_the_speed_now() -> None:
    parts = PartCosts(flops=1e9)
    cluster = paper(10, 10).with_rates({1: 2})
    lines = [compute_lines(Stage((rank,)), parts, cluster)[0] for rank in (0, 1)]
    assert [line.slope for line in lines] == [pytest.approx(0.3), pytest.approx(0.6)]


def test_parameters_are_moved_once_per_micro_batch_whatever_its_rows_are() -> None:
    parts = PartCosts(parameter_bytes=4e6, split_parameter_bytes=4e6)
    first, second = compute_lines(Stage((0, 1), (3, 1)), parts, paper(1, 1))
    assert (first.slope, second.slope) == (0.0, 0.0)
    assert first.fixed == pytest.approx(WEIGHT_MOVES * 3e6 * FLOPS_PER_BYTE / 1e9)
    assert second.fixed == pytest.approx(first.fixed / 3)


def test_memory_is_moved_as_fast_as_is_known_of_the_device_or_of_its_kind() -> None:
    parts = PartCosts(traffic_bytes=1e9)
    cluster = Cluster.on_paper([1e14] * 3, kinds=["H100-80G", "H100-80G", "unheard of"])
    given = replace(cluster.devices[1], memory_bytes_per_second=2e12)
    cluster = replace(cluster, devices=(cluster.devices[0], given, cluster.devices[2])).with_rates({1: 3.0})
    lines = [compute_lines(Stage((rank,)), parts, cluster)[0] for rank in range(3)]
    assert [line.slope for line in lines] == pytest.approx([3 / 3350, 3 * 3 / 2000, 3e9 * FLOPS_PER_BYTE / 1e14])


def test_only_what_is_cut_shrinks_with_the_share() -> None:
    parts = PartCosts(flops=8e9, split_flops=6e9)
    first, second = compute_lines(Stage((0, 1), (2, 1)), parts, paper(1, 1))
    assert (first.slope, second.slope) == (pytest.approx(3 * 6), pytest.approx(3 * 4))


def test_tensor_parallel_costs_nothing_alone_and_latency_per_message() -> None:
    parts = PartCosts(reduced_bytes=100, num_reductions=2, returned_bytes=60, num_returns=1)
    cluster = paper(1, 1)
    assert tensor_parallel_lines(Stage((0,)), parts, cluster) == (Line(), Line())
    forward, backward = tensor_parallel_lines(Stage((0, 1)), parts, cluster)
    assert forward.fixed == pytest.approx(2 * 2 * FAST_LINK.latency_seconds)
    assert forward.slope == pytest.approx(2 * 50 / 1e10)
    assert backward.fixed == pytest.approx(2 * FAST_LINK.latency_seconds)
    assert backward.slope == pytest.approx(2 * 30 / 1e10)


def test_each_turn_of_a_group_costs_what_its_latest_device_loses_to_meet() -> None:
    parts = PartCosts(num_reductions=2, num_returns=1, reduced_bytes=100)
    late = Cluster.on_paper([1e9] * 3, intra=FAST_LINK, meeting_seconds=[1e-3, 5e-3, 0.0])
    sums, returns = tensor_parallel_lines(Stage((0, 1, 2)), parts, late)
    on_time, _ = tensor_parallel_lines(Stage((0, 1, 2)), parts, paper(1, 1, 1))
    assert sums == Line(pytest.approx(on_time.fixed + 2 * 2 * 5e-3), on_time.slope)
    assert returns.fixed == pytest.approx(2 * 5e-3 + on_time.fixed / 2)
    gathers, _ = tensor_parallel_lines(Stage((0, 1), context=2), parts, late)
    assert gathers.fixed == pytest.approx(2 * 5e-3 + 2 * FAST_LINK.latency_seconds)
    assert tensor_parallel_lines(Stage((1,)), parts, late) == (Line(), Line())


def test_rows_go_round_together_so_that_what_one_of_them_would_wait_does_not_count_for_each() -> None:
    timed = timed_collective("all_reduce", TimedGroup("intra", (0, 1)), [4e-3, 8e-3, 16e-3])
    cluster = replace(paper(1, 1), collectives=(timed,))
    row = SIZES[0] / 4
    forward, _ = tensor_parallel_lines(Stage((0, 1)), PartCosts(reduced_bytes=row, num_reductions=1), cluster)
    rows = SIZES[-1] / row
    assert forward.fixed + rows * forward.slope == pytest.approx(16e-3, rel=1e-2)
    assert forward.fixed == pytest.approx(4e-3, rel=1e-2)
