"""Choosing home layouts: owned once, inside what a rank reads, in proportion to weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Sharding, Split
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.plans.homes import choose_homes, home_weights, largest_remainder, make_home_layouts
from hetu_fx.plans.plan import Plan

REPLICAS = Annotation.on((0, 1, 2), Duplicate(3))
TP_IN_DP = Annotation.on((0, 1, 2, 3), Duplicate(2), Split(0, (1, 1)))
UNEQUAL = Annotation(
    (DeviceGroup((0, 1)), DeviceGroup((2,))), (Sharding((Split(0, (2, 1)),)), Sharding()), Duplicate(2)
)
SHAPES = {"read by 0 and 1": (64, 64), "read by 2": (64, 32), "small": (4,), "never read": (2048,)}
READ = {
    "read by 0 and 1": Annotation.on((0, 1), Split(0, (1, 1))),
    "read by 2": Annotation.on((2,)),
    "small": Annotation.on((0, 1), Duplicate(2)),
}


def home(shape: tuple[int, ...], compute: Annotation, weights: list[float] | None = None) -> Annotation:
    return make_home_layouts({"w": shape}, {"w": compute}, weights or [1.0] * (max(compute.ranks) + 1))["w"]


def test_zero_0_keeps_the_copies() -> None:
    assert make_home_layouts({"w": (8, 8)}, {"w": REPLICAS}, [1.0] * 3, zero=0) == {"w": REPLICAS}


def test_zero_1_cuts_rows_in_proportion_to_weights() -> None:
    assert home((300, 20), REPLICAS, [3.0, 1.0, 2.0]) == Annotation.on((0, 1, 2), Split(0, (3, 1, 2)))


def test_a_short_first_dim_leaves_the_cut_to_the_next() -> None:
    assert home((4, 900), REPLICAS) == Annotation.on((0, 1, 2), Split(1, (1, 1, 1)))


def test_a_rank_of_weight_zero_owns_nothing() -> None:
    assert home((512, 20), REPLICAS, [1.0, 0.0, 1.0]) == Annotation.on((0, 2), Split(0, (1, 1)))


def test_tensor_parallel_parts_are_shared_among_their_readers() -> None:
    assert home((64, 64), TP_IN_DP) == Annotation.on((0, 2, 1, 3), Split(0, (1, 1, 1, 1)))


def test_a_part_too_short_to_share_is_cut_along_another_dim() -> None:
    found = home((2, 2048), TP_IN_DP)
    assert found.top == Split(0, (1, 1))
    assert [group.ranks for group in found.groups] == [(0, 2), (1, 3)]
    assert found.shardings[0].axes == (Split(1, (1, 1)),)


def test_sub_factors_are_cut_inside() -> None:
    fused = Annotation.on((0, 1, 2, 3), Duplicate(2), Split(0, (1, 1), outer=3, inner=8))
    assert home((3 * 12 * 8, 96), fused) == Annotation.on((0, 2, 1, 3), Split(0, (1,) * 4, outer=3, inner=8))


def test_unequal_degrees_keep_most_elements_where_they_are_read() -> None:
    assert home((300, 20), UNEQUAL) == Annotation.on((0, 2, 1), Split(0, (1, 1, 1)))


def test_small_tensors_go_to_the_least_loaded_rank() -> None:
    shapes = {"big": (2048, 8), **{f"bias{i}": (10,) for i in range(6)}, "scale": ()}
    found = make_home_layouts(shapes, dict.fromkeys(shapes, REPLICAS), [1.0, 1.0, 2.0])
    assert [len(found[name].ranks) for name in shapes] == [3, 1, 1, 1, 1, 1, 1, 1]
    assert {found[name].ranks[0] for name in shapes if name != "big"} == {0, 1, 2}


def test_small_cut_tensors_stay_inside_their_parts() -> None:
    found = home((64,), TP_IN_DP)
    assert found == Annotation.on((0, 1), Split(0, (1, 1)))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(PlanError, match="zero is 4\nhint: give 0"):
        make_home_layouts({}, {}, [1.0], zero=4)
    with pytest.raises(PlanError, match="hint: give 2 numbers from 0"):
        make_home_layouts({}, {}, [1.0, -1.0])


@given(st.integers(0, 500), st.lists(st.floats(0, 100), min_size=1, max_size=7))
def test_sharing_out_is_exact_and_fair(size: int, weights: list[float]) -> None:
    shares = largest_remainder(size, weights)
    assert sum(shares) == size
    total = sum(weights)
    ideals = [size * w / total if total else size / len(weights) for w in weights]
    assert all(abs(share - ideal) <= 1 for share, ideal in zip(shares, ideals, strict=True))


@given(st.sampled_from([REPLICAS, TP_IN_DP, UNEQUAL]), st.integers(1, 9), st.integers(1, 300))
def test_every_element_is_owned_exactly_once(compute: Annotation, rows: int, columns: int) -> None:
    shape = (rows * 6, columns)
    found = home(shape, compute, [1.0, 2.0, 1.5, 0.5][: max(compute.ranks) + 1])
    owned = [math.prod(found.region(rank, shape).local_shape) for rank in found.ranks]
    assert sum(owned) == math.prod(shape)
    boxes = [box for rank in found.ranks for box in found.region(rank, shape).boxes]
    assert len(boxes) == len(set(boxes))


def owners(weights: list[float], zero: int = 1) -> dict[str, dict[int, int]]:
    """Give the elements that each rank owns."""
    plan = Plan(Plan.data_parallel((0, 1, 2)).pipelines, zero=zero)
    homes = choose_homes(plan, READ, SHAPES, weights)
    return {
        name: {r: torch.Size(home.region(r, SHAPES[name]).local_shape).numel() for r in home.ranks}
        for name, home in homes.items()
    }


def test_homes_are_where_the_plan_reads_if_all_devices_have_a_share() -> None:
    found = owners([1.0, 1.0, 1.0])
    assert found["read by 0 and 1"] == {0: 2048, 1: 2048}
    assert found["read by 2"] == {2: 2048}
    assert len(found["small"]) == 1
    assert sum(found["never read"].values()) == 2048


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_device_without_a_share_owns_nothing_and_nothing_is_lost(left_out: int, zero: int) -> None:
    found = owners([0.0 if rank == left_out else 1.0 for rank in range(3)], zero)
    for name, shape in SHAPES.items():
        assert left_out not in found[name]
        assert sum(found[name].values()) == torch.Size(shape).numel()


def test_shares_follow_the_weights_where_homes_are_elsewhere() -> None:
    assert owners([0.0, 3.0, 1.0])["read by 0 and 1"] == {1: 3072, 2: 1024}


def test_homes_are_weighed_by_speed_where_it_is_known() -> None:
    plan = Plan.data_parallel(2)
    assert home_weights(plan, None, 2) == [1.0, 1.0]
    assert home_weights(plan, Cluster.on_paper((2e9, 6e9)), 2) == [2e9, 6e9]


def test_a_plan_that_says_shares_of_homes_has_them_whatever_the_speeds_are() -> None:
    plan = replace(Plan.data_parallel(2, (1, 3)), homes=(3, 1))
    weights = home_weights(plan, Cluster.on_paper((2e9, 6e9, 1e9)), 3)
    assert weights == [3.0, 1.0, 0.0]
    read = {"w": Annotation.replicated((0, 1))}
    home = choose_homes(plan, read, {"w": (4, 512)}, weights)["w"]
    assert [home.region(rank, (4, 512)).local_shape for rank in home.ranks] == [(3, 512), (1, 512)]
