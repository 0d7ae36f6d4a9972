import os
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.measure import (
    Measurement,
    memory_limits,
    node_name,
    settled,
    snapped,
)
from tests.spawned import results_of


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def machine(root: Path, cgroup: str) -> Path:
    write(root, "proc/meminfo", "MemTotal:     1000 kB\nMemFree: 5 kB\n")
    write(root, "proc/self/cgroup", cgroup)
    return root


def test_equal_speeds_with_noise_are_one_speed() -> None:
    assert snapped([100.0, 98.0, 51.0, 50.0, 96.0]) == [98.0, 98.0, 50.5, 50.5, 98.0]


def test_speeds_that_differ_stay_apart() -> None:
    assert snapped([80.0, 40.0, 20.0]) == [80.0, 40.0, 20.0]


def test_memory_of_v2_cgroups_counts_those_above(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job/rank1\n")
    write(root, "sys/fs/cgroup/job/rank1/memory.max", "300000\n")
    write(root, "sys/fs/cgroup/job/memory.max", "max\n")
    write(root, "sys/fs/cgroup/memory.max", "700000\n")
    assert sorted(limit for _, limit in memory_limits("cpu", root)) == [300000, 700000, 1024000]


def test_memory_of_v1_cgroups_ignores_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:cpu:/job\n4:memory,x:/job\n0::/elsewhere\n")
    write(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert sorted(limit for _, limit in memory_limits("cpu", root)) == [400000, 1024000]


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limits("cpu", machine(tmp_path, "")) == (("machine", 1024000),)


def test_a_limit_is_shared_by_the_ranks_it_limits() -> None:
    raw = [
        Measurement("cpu", "a", 1.0, (("machine", 900), ("job", 100))),
        Measurement("cpu", "a", 1.0, (("machine", 900),)),
        Measurement("cpu", "b", 1.0, (("machine", 900),)),
    ]
    assert [m.memory_bytes for m in settled(raw)] == [100, 450, 900]


def test_steps_of_devices_that_are_alike_take_the_same_besides() -> None:
    limits = (("machine", 900),)
    raw = [Measurement("cpu", node, 1.0, limits, step_seconds=s) for node, s in (("a", 0.01), ("a", 0.03), ("b", 0.05))]
    assert [m.step_seconds for m in settled(raw)] == [0.02, 0.02, 0.05]


def test_the_node_name_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_NODE", "rack7")
    assert node_name() == "rack7"


def test_one_process_measures_itself() -> None:
    cluster = Cluster.measure(seconds=0.0)
    assert cluster.ranks == (0,)
    assert cluster.device(0).memory_bytes > 0


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
