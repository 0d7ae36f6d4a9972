import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from hetu_fx.cluster import measure
from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.cluster.measure import (
    Sample,
    denoise_devices,
    group_speeds,
    meeting_rounds,
    meeting_seconds,
    settled_seconds,
)
from tests.spawned import results_of


def test_equal_speeds_with_noise_are_one_speed() -> None:
    assert group_speeds([100.0, 98.0, 51.0, 50.0, 96.0]) == [98.0, 98.0, 50.5, 50.5, 98.0]


def test_speeds_that_differ_stay_apart() -> None:
    assert group_speeds([80.0, 40.0, 20.0]) == [80.0, 40.0, 20.0]


def test_a_limit_is_shared_by_the_ranks_it_limits() -> None:
    raw = [
        (Device(0, "cpu", "a", 1.0, 100), (("machine", 900), ("job", 100))),
        (Device(1, "cpu", "a", 1.0, 900), (("machine", 900),)),
        (Device(2, "cpu", "b", 1.0, 900), (("machine", 900),)),
    ]
    assert [m.memory_bytes for m in denoise_devices(raw)] == [100, 450, 900]


def test_steps_of_devices_that_are_alike_take_the_same_besides() -> None:
    limits = (("machine", 900),)
    steps = enumerate((("a", 0.01), ("a", 0.03), ("b", 0.05)))
    raw = [(Device(rank, "cpu", node, 1.0, 900, step_seconds=s), limits) for rank, (node, s) in steps]
    assert [m.step_seconds for m in denoise_devices(raw)] == [0.02, 0.02, 0.05]


def test_memory_and_ops_of_one_kind_and_speed_are_alike_on_all_nodes() -> None:
    nodes = (("a", 1e9, 1e-6), ("b", 3e9, 3e-6), ("c", 2e9, 2e-6))
    raw = [
        (Device(i, "cpu", node, 1.0, 900, memory_bytes_per_second=memory, op_seconds=op), (("machine", 900),))
        for i, (node, memory, op) in enumerate(nodes)
    ]
    assert {(d.memory_bytes_per_second, d.op_seconds) for d in denoise_devices(raw)} == {(2e9, 2e-6)}


def test_one_process_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_FX_NODE", raising=False)
    cluster = Cluster.measure(seconds=0.0)
    assert cluster.ranks == (0,)
    assert cluster.device(0).node == socket.gethostname()  # what tells it from others of that name is not shown
    assert cluster.device(0).memory_bytes > 0
    assert cluster.device(0).memory_bytes_per_second
    assert cluster.device(0).op_seconds


@pytest.mark.parametrize(
    ("step_flops", "windows"), [(math.inf, [0.5]), (0.0, [0.1]), (1e7, [0.1]), (4e7, [0.1, 0.2]), (1e12, [0.1, 0.5])]
)
def test_compute_is_measured_for_as_long_as_some_steps_take(
    step_flops: float, windows: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(measure, "own_quota", lambda: None)
    monkeypatch.setattr(measure, "matmul_flops_per_second", lambda device, seconds: seen.append(seconds) or 1e9)
    for name in ("memory_bytes_per_second", "op_seconds"):
        monkeypatch.setattr(measure, name, lambda device, seconds: 1.0)
    Cluster.measure(step_flops=step_flops)
    assert seen == windows


def test_a_quota_is_measured_over_two_of_its_periods_and_a_gpu_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "own_quota", lambda: 2.0)
    assert measure._least_seconds(torch.device("cpu")) == 0.2
    assert measure._least_seconds(torch.device("cuda")) == math.inf


def measure_as(rank: int, size: int, store: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["HETU_FX_NODE"] = "ab"[rank // 2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results.put((rank, Cluster.measure(seconds=0.05)))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_every_rank_gets_the_same_cluster(tmp_path: Path) -> None:
    found = results_of(measure_as, 3, 3, str(tmp_path / "store"), seconds=100)
    assert found[0] == found[1] == found[2]
    assert [device.node for device in found[0].devices] == ["a", "a", "b"]
    assert found[0].inter.latency_seconds > 0
    assert all(device.meeting_seconds >= 0 for device in found[0].devices)
    assert all(device.step_seconds > 0 for device in found[0].devices)


def samples(*lost: float) -> list[Sample]:
    """Return samples of four rounds in which each meeting takes so many seconds."""
    return [Sample(alone=1.0, together=1.0 + 4 * seconds, rounds=4) for seconds in lost]


def test_a_meeting_costs_what_rounds_with_it_take_longer_less_its_message() -> None:
    assert meeting_seconds(samples(0.005), 0.001) == pytest.approx(0.004)


def test_one_disturbed_sample_does_not_count() -> None:
    assert meeting_seconds(samples(0.005, 0.9, 0.004), 0.0) == pytest.approx(0.005)


def test_a_meeting_never_gains_time() -> None:
    assert meeting_seconds(samples(-0.01, -0.02, 0.003), 0.0) == 0.0


def test_neighbours_in_speed_on_a_node_meet() -> None:
    assert meeting_rounds("aaaa", [2, 8, 1, 4]) == (((1, 3), (0, 2)),)
    assert meeting_rounds("abab", [1, 1, 2, 2]) == (((2, 0), (3, 1)),)


def test_every_rank_meets_another_whatever_the_nodes() -> None:
    for nodes in ("ab", "abc", "aab", "aaab", "aaabbbc", "aabbcde", "aaa"):
        rounds = meeting_rounds(nodes, [1.0] * len(nodes))
        assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(len(nodes)))
        for pairs in rounds:
            busy = [rank for pair in pairs for rank in pair]
            assert len(busy) == len(set(busy)), f"{nodes}: {pairs}"


def test_a_device_that_is_alone_meets_nobody() -> None:
    assert meeting_rounds("a", [1.0]) == ()


def test_devices_that_are_alike_lose_the_same() -> None:
    assert settled_seconds("aaba", {0: 0.001, 1: 0.004, 2: 0.0070001, 3: 0.003}) == (0.003, 0.003, 0.007, 0.003)
    assert settled_seconds("ab", {}) == (0.0, 0.0)
