"""Which quota a process is under, in the hierarchies of both versions; files of a folder stand for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetu_fx.base import cgroups
from hetu_fx.base.cgroups import MemoryKills, cgroup_quota, count_memory_kills, quota_within


@pytest.fixture
def v1(tmp_path: Path) -> str:
    for folder, quota in (("", "-1"), ("pod", "150000"), ("pod/rank0", "20000"), ("pod/rank1", "-1")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / folder / "cpu.cfs_period_us").write_text("100000\n")
    return f"cgroup {tmp_path} cgroup rw,cpu,cpuacct 0 0\n"


@pytest.fixture
def v2(tmp_path: Path) -> str:
    for folder, quota in (("pod", "max 100000"), ("pod/rank0", "25000 50000")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(f"{quota}\n")
    return f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"


@pytest.mark.parametrize(("path", "quota"), [("/", None), ("/pod", 1.5), ("/pod/rank0", 0.2), ("/pod/rank1", 1.5)])
def test_the_least_quota_around_a_process_counts(v1: str, path: str, quota: float | None) -> None:
    assert quota_within(v1, f"3:cpu,cpuacct:{path}\n0::/else\n") == quota


@pytest.mark.parametrize(("path", "quota"), [("/", None), ("/pod", None), ("/pod/rank0", 0.5)])
def test_the_one_hierarchy_of_version_2_is_read_too(v2: str, path: str, quota: float | None) -> None:
    assert quota_within(v2, f"0::{path}\n") == quota


def test_a_path_that_is_the_hosts_stands_for_what_is_mounted(v2: str, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 50000\n")
    assert quota_within(v2, "0::/system.slice/container.scope\n") == 2.0


def test_without_a_hierarchy_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_within("proc /proc proc rw 0 0\n", "0::/\n") is None
    assert cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "text", "kills"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill 2\n", 2),
        ("memory.events", "max 7\noom 4\noom_kill 3\noom_group_kill 0\n", 3),
        ("memory.max", "max\n", 0),
    ],
)
def test_it_is_counted_whom_the_kernel_has_killed_for_memory(tmp_path: Path, file: str, text: str, kills: int) -> None:
    (tmp_path / file).write_text(text)
    assert count_memory_kills(tmp_path) == kills


def test_a_kill_is_accounted_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_around", lambda mounts, own, controller: [tmp_path])
    kills = MemoryKills()
    for process, count in ((1, 4), (2, 5), (3, 5)):
        (tmp_path / "memory.events").write_text(f"oom_kill {count}\n")
        kills.watch(process)
    assert [kills.cgroup_of(process) for process in (1, 2, 4)] == [tmp_path, None, None]
