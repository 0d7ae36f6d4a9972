from pathlib import Path

import pytest
import torch

from hetu_fx.cluster.host import memory_left, memory_limits, peak_bytes


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def machine(root: Path, cgroup: str, mounts: str = "") -> Path:
    write(root, "proc/meminfo", "MemTotal:     1000 kB\nMemFree: 5 kB\nMemAvailable: 900 kB\n")
    write(root, "proc/self/cgroup", cgroup)
    write(root, "proc/self/mounts", mounts)
    return root


def test_memory_of_v2_cgroups_counts_those_above(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job/rank1\n", f"cgroup2 {tmp_path}/sys/fs/cgroup cgroup2 rw 0 0\n")
    write(root, "sys/fs/cgroup/job/rank1/memory.max", "300000\n")
    write(root, "sys/fs/cgroup/job/memory.max", "max\n")
    write(root, "sys/fs/cgroup/memory.max", "700000\n")
    assert sorted(limit for _, limit in memory_limits("cpu", root)) == [300000, 700000, 1024000]


def test_the_peak_of_a_process_is_that_of_the_system_and_0_where_that_does_not_tell(tmp_path: Path) -> None:
    assert peak_bytes(torch.device("cpu"), tmp_path) == 0
    write(tmp_path, "proc/self/status", "VmPeak: 9 kB\nVmHWM:    7 kB\nVmRSS: 5 kB\n")
    assert peak_bytes(torch.device("cpu"), tmp_path) == 7 * 1024
    assert 1e8 < peak_bytes(torch.device("cpu")) < 1e11


def test_memory_of_v1_cgroups_ignores_no_limit(tmp_path: Path) -> None:
    mounts = f"cgroup {tmp_path}/sys/fs/cgroup/memory cgroup rw,memory,x 0 0\n"
    root = machine(tmp_path, "5:cpu:/job\n4:memory,x:/job\n0::/elsewhere\n", mounts)
    write(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert sorted(limit for _, limit in memory_limits("cpu", root)) == [400000, 1024000]


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limits("cpu", machine(tmp_path, "")) == (("machine", 1024000),)


def test_what_is_left_counts_unused_pages_of_files_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_FX_NODE", "n")
    root = machine(tmp_path, "0::/job\n", f"cgroup2 {tmp_path}/sys/fs/cgroup cgroup2 rw 0 0\n")
    write(root, "sys/fs/cgroup/job/memory.max", "300000\n")
    write(root, "sys/fs/cgroup/job/memory.current", "250000\n")
    write(root, "sys/fs/cgroup/job/memory.stat", "anon 100\ninactive_file 50000\n")
    folder = tmp_path / "sys/fs/cgroup/job"
    assert memory_left(torch.device("cpu"), root) == (("machine of node n", 921600), (f"{folder} of node n", 100000))
