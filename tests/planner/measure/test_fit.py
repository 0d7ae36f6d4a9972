"""From seconds of shards to what a profile says; nothing here takes time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import ProfileError
from hetu_fx.planner.measure.fit import (
    BlockSample,
    block_time,
    calibrate_from_profile,
    distinct_blocks,
    fastest_of_kind,
    slowdown,
    timed_degrees,
    timed_lengths,
)
from hetu_fx.planner.price.stage_seconds import compute_lines, tensor_parallel_lines
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Stage
from tests.planner.examples import paper, transformer

LENGTH = 64
COSTS = transformer(length=LENGTH)
LENGTHS = (16, 32, 48, 64)


def samples(degree: int, a: float, b: float, c: float, count: int = 1) -> list[BlockSample]:
    """Return samples that lie on a curve."""
    return [BlockSample(degree, s, a * s * s + b * s + c, 100.0 * s / degree, count) for s in LENGTHS]


def test_each_distinct_block_is_timed_once_and_away_from_the_ends() -> None:
    dense, sparse = COSTS.blocks[0], replace(COSTS.blocks[0], flops=2 * COSTS.blocks[0].flops)
    mixed = replace(COSTS, blocks=(dense, sparse, dense, dense))
    assert distinct_blocks(mixed) == ((2, 3), (1, 1))
    assert distinct_blocks(COSTS) == ((2, 4),)


def test_degrees_cut_the_units_evenly() -> None:
    assert [timed_degrees(units) for units in (1, 2, 3, 12, 16)] == [(1,), (1, 2), (1,), (1, 2, 4), (1, 2, 4, 8)]


def test_sequences_that_would_take_too_long_are_shortened() -> None:
    assert timed_lengths(4096, 10.0, 90.0) == (1024, 2048, 3072, 4096)
    assert timed_lengths(4096, 180.0, 90.0) == (512, 1024, 1536, 2048)
    with pytest.raises(ProfileError, match="too short for a curve\nhint: give a batch with rows of 4 tokens"):
        timed_lengths(4096, 1e6, 1.0)


def test_the_curve_of_a_block_is_found_again() -> None:
    time = block_time("paper", samples(1, 1e-6, 2e-5, 3e-4), COSTS, LENGTH, paper(1))
    assert (time.a, time.b, time.c) == (pytest.approx(1e-6), pytest.approx(2e-5), pytest.approx(3e-4))
    assert time.r_squared == pytest.approx(1.0)
    assert (time.kind, time.tensor_parallel, time.source) == ("paper", 1, "measured")


def test_blocks_count_as_often_as_they_stand_in_the_model() -> None:
    mixed = [*samples(1, 0.0, 1e-5, 0.0, count=3), *samples(1, 0.0, 5e-5, 0.0, count=1)]
    time = block_time("paper", mixed, COSTS, LENGTH, paper(1))
    assert time.b == pytest.approx(2e-5)
    assert time.bytes_per_token == pytest.approx(100.0)


def test_a_group_pays_for_its_communication_and_its_meetings() -> None:
    cluster = Cluster.on_paper([1e9, 1e9], intra=Link(1e8, 1e-4), meeting_seconds=[2e-3, 2e-3])
    time = block_time("paper", samples(2, 0.0, 1e-5, 0.0), COSTS, LENGTH, cluster)
    block = COSTS.blocks[0]
    assert time.c == pytest.approx(4 * (2 * 1e-4 + 2 * 2e-3))  # two sums in the forward, two in the backward
    sent = block.reduced_bytes + block.returned_bytes
    assert time.b == pytest.approx(1e-5 + sent / 1e8 / LENGTH)


def test_times_that_do_not_grow_with_the_length_are_refused_with_the_way_out() -> None:
    falling = [BlockSample(1, length, 1.0 / length, 0.0) for length in LENGTHS]
    with pytest.raises(ProfileError, match=r"a block on 1 x 'paper': no curve .*\nhint: measure longer sequences"):
        block_time("paper", falling, COSTS, LENGTH, paper(1))


def test_alpha_is_the_slowdown_on_smaller_groups() -> None:
    times = [BlockTime("paper", degree, 0.0, 1e-5 / degree, 1e-4) for degree in (1, 2, 4)]
    alpha = slowdown(times, 100)
    assert alpha.factors == {1: pytest.approx(11 / 3.5), 2: pytest.approx(6 / 3.5), 4: 1.0}


def test_the_fastest_healthy_device_of_a_kind_is_the_one_that_times_hold_for() -> None:
    cluster = paper(1, 3, 3, 2).with_rates({1: 9.0})
    assert fastest_of_kind("paper", cluster).rank == 1


def seconds_of_a_row(cluster: Cluster, parts: PartCosts = COSTS.blocks[0]) -> float:
    """Return the seconds of a block for a row, as counted."""
    return compute_lines(Stage((0,)), parts, cluster)[0](1)


def test_a_measured_kind_gets_the_speed_at_which_its_blocks_take_as_long_as_measured() -> None:
    cluster = paper(2, 1)
    line = compute_lines(Stage((0,)), COSTS.blocks[0], cluster)[0]
    time = BlockTime("paper", 1, 0.0, 4 * line.slope / LENGTH, line.fixed)
    found = calibrate_from_profile(cluster, Profile(COSTS, LENGTH, times=(time,)))
    assert [d.flops_per_second for d in found.devices] == [pytest.approx(0.5e9), pytest.approx(0.25e9)]
    assert seconds_of_a_row(found) == pytest.approx(time.seconds(LENGTH))


def test_of_times_that_are_all_overhead_a_tenth_counts_as_work() -> None:
    time = BlockTime("paper", 1, 0.0, 1e-12, 1.0)
    found = calibrate_from_profile(paper(1), Profile(COSTS, LENGTH, times=(time,)))
    line = compute_lines(Stage((0,)), COSTS.blocks[0], found)[0]
    assert (line.fixed, line.slope) == (pytest.approx(0.9), pytest.approx(0.1))


def test_a_kind_that_nobody_timed_keeps_its_speed() -> None:
    time = BlockTime("other", 1, 0.0, 1.0)
    assert calibrate_from_profile(paper(2, 1), Profile(COSTS, LENGTH, times=(time,))) == paper(2, 1)
    assert calibrate_from_profile(paper(2), Profile(COSTS, 0, times=(replace(time, kind="paper"),))) == paper(2)


GPUS = {"H100-80G": (3.1e-11, 4.4e-7), "A100-80G": (7.7e-11, 1.2e-6)}
"""Seconds per squared token and per token, of the order in which such blocks take them; not measured."""


def gpus(kind: str, count: int = 8) -> Cluster:
    """Return a node of GPUs as a cluster file tells of it: nothing but their kind."""
    devices = [{"rank": rank, "kind": kind} for rank in range(count)]
    links = {"intra": {"bytes_per_second": 3e11, "latency_seconds": 5e-6}}
    return Cluster.from_json({"format": "hetu_fx.cluster/1", "devices": devices, "links": links})


def large(length: int) -> ProgramCosts:
    """Return a decoder of the size that such devices run."""
    return transformer(layers=8, rows=8, length=length, width=4096, vocabulary=32000, units=8)


def times_on(kind: str, cluster: Cluster) -> tuple[BlockTime, ...]:
    """Return what groups of four sizes take: narrow products are less efficient, and launches do not get fewer."""
    a, b = GPUS[kind]
    found = []
    for degree, lost in ((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.7)):
        given = [
            BlockSample(degree, s, (a * s * s + b * s) * lost / degree + 9e-4, 1.0) for s in (512, 1024, 2048, 4096)
        ]
        found.append(block_time(kind, given, large(2048), 2048, cluster))
    return tuple(found)


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("length", [512, 1000, 2048, 4096])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_measured_block_is_priced_at_what_was_measured(kind: str, length: int, degree: int) -> None:
    times = times_on(kind, gpus(kind))
    costs = large(length)
    found = calibrate_from_profile(gpus(kind), Profile(costs, length, times=times))
    stage = Stage(tuple(range(degree)))
    compute, sums = compute_lines(stage, costs.blocks[0], found), tensor_parallel_lines(stage, costs.blocks[0], found)
    priced = max(line(1) for line in compute) + sum(line(1) for line in sums)
    (time,) = (one for one in times if one.tensor_parallel == degree)
    assert priced / time.seconds(length) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("kind", GPUS)
def test_between_measured_degrees_a_block_takes_what_lies_between(kind: str) -> None:
    costs = large(2048)
    found = calibrate_from_profile(gpus(kind), Profile(costs, 2048, times=times_on(kind, gpus(kind))))
    two, three, four = (compute_lines(Stage(tuple(range(n))), costs.blocks[0], found)[0](1) for n in (2, 3, 4))
    assert two > three > four
    assert calibrate_from_profile(found, Profile(costs, 2048, times=times_on(kind, gpus(kind)))).paces == found.paces
