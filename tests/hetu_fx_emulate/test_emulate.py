"""Emulated devices, decided: specs, quotas, nodes and the plan of a run. No process is started here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetu_fx.base.checks import parse_rate
from hetu_fx.base.machine import start_time
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.cleanup import is_dead, remove_run, run_name, sweep
from hetu_fx_emulate.emulate import EmulateSpec, change_speed, current_speeds, lift_speeds, plan_run, run
from hetu_fx_emulate.emulation_plan import describe
from hetu_fx_emulate.limits import (
    Affinity,
    CgroupV1,
    CgroupV2,
    Setting,
    assign_cores,
    controller_settings,
    find_limiter,
    memory_settings,
    num_cores,
    quota_and_period,
    shared_speeds,
    speed_settings,
)
from hetu_fx_emulate.network import network_commands, run_command
from hetu_fx_emulate.spec import check_cores, parse_memory, parse_size, parse_speeds


def test_texts_of_the_command_line_are_read() -> None:
    assert parse_speeds("0.8, 0.4") == (0.8, 0.4)
    assert parse_memory("2G,512M,-") == (2 << 30, 512 << 20, None)
    assert [parse_size(text) for text in ("1.5k", "3GiB", "7")] == [1536, 3 << 30, 7]
    assert [parse_rate(text) for text in ("200mbit", "1Gbit", "10kbit/s")] == [200e6, 1e9, 10e3]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (parse_speeds, "0.8,fast", "speed 'fast' is not a number"),
        (parse_size, "2X", "memory size '2X' is not a number of bytes\nhint: write it like 512M"),
        (parse_rate, "200", "link rate '200' is not a rate\nhint: write it like 200mbit"),
        (parse_size, "1.2.3G", "memory size '1.2.3' is not a number"),
    ],
)
def test_unreadable_texts_are_refused(read: object, text: str, said: str) -> None:
    assert callable(read)
    with pytest.raises(EnvironmentProblem, match=said.replace("?", r"\?")):
        read(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speeds": ()}, "no speeds given"),
        ({"speeds": (0.5, 0.0)}, "speed 0 of rank 1 is no share of cores"),
        ({"speeds": (float("nan"),)}, "speed nan of rank 0"),
        ({"speeds": (0.5, 0.5), "memory": (1 << 30,)}, "1 memory sizes for 2 speeds"),
        ({"speeds": (0.5,), "memory": (100,)}, "rank 0 would get 100 bytes"),
        ({"speeds": (0.5,), "num_nodes": 2}, "cannot spread 1 ranks over 2 nodes"),
        ({"speeds": (0.5,), "link_bits_per_second": 1e6}, "add --nodes 2"),
        ({"speeds": (0.5, 0.5), "num_nodes": 2, "link_bits_per_second": 1.0}, "at least 8kbit"),
    ],
)
def test_impossible_specs_cannot_be_built(fields: dict[str, object], said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        EmulateSpec(**fields)  # type: ignore[arg-type]


def test_ranks_are_spread_evenly_and_in_order() -> None:
    spec = EmulateSpec(speeds=(0.1,) * 5, num_nodes=2)
    assert [spec.ranks_of(node) for node in range(2)] == [(0, 1, 2), (3, 4)]
    assert [spec.node_of(rank) for rank in range(5)] == [0, 0, 0, 1, 1]


def test_speeds_that_fill_the_machine_are_refused_with_ones_that_fit() -> None:
    with pytest.raises(EnvironmentProblem, match=r"sum to 2, but must sum to less than the 2 cores .*\n.* 0.9,0.9"):
        check_cores((1.0, 1.0), 2)
    check_cores((0.9, 0.9), 2)


@pytest.mark.parametrize(
    ("speed", "expected"),
    [(0.8, (8000, 10000)), (0.1, (1000, 10000)), (0.05, (1000, 20000)), (2.5, (25000, 10000))],
)
def test_quotas_never_fall_below_what_the_kernel_takes(speed: float, expected: tuple[int, int]) -> None:
    assert quota_and_period(speed) == expected


V1_MOUNTS = "cgroup {0}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup {0}/memory cgroup rw,memory 0 0\n"
V2_MOUNTS = "cgroup2 {0} cgroup2 rw,nosuid 0 0\n"


def test_version_1_is_found_in_our_own_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu/mine").mkdir(parents=True)
    (tmp_path / "memory").mkdir()
    own = "3:cpu,cpuacct:/mine\n2:memory:/not/visible/here\n"
    found = find_limiter(V1_MOUNTS.format(tmp_path), own)
    assert found == CgroupV1(tmp_path / "cpu/mine", tmp_path / "memory")


def test_version_2_is_found_where_it_has_a_cpu_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    assert find_limiter(V2_MOUNTS.format(tmp_path), "0::/\n") == CgroupV2(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    assert find_limiter(V2_MOUNTS.format(tmp_path), "0::/\n") == Affinity(f"{tmp_path} has no cpu controller")


def test_without_cgroups_affinity_is_left() -> None:
    found = find_limiter("proc /proc proc rw 0 0\n", "")
    assert found == Affinity("no cgroup hierarchy with CPU quotas is mounted")


def test_a_quota_on_ourselves_counts_as_fewer_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_cores(CgroupV2(tmp_path)) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(CgroupV2(tmp_path)) == num_cores(Affinity("test"))


def test_version_1_settings() -> None:
    limiter = CgroupV1(Path("/c"), Path("/m"))
    settings = speed_settings(limiter, "run", 1, 0.4) + memory_settings(limiter, "run", 1, 1 << 30)
    assert [(str(setting.path), setting.text) for setting in settings] == [
        ("/c/run/rank1/cpu.cfs_period_us", "10000"),
        ("/c/run/rank1/cpu.cfs_quota_us", "4000"),
        ("/m/run/rank1/memory.limit_in_bytes", "1073741824"),
        ("/m/run/rank1/memory.memsw.limit_in_bytes", "1073741824"),
    ]


def test_version_2_settings_hand_the_controllers_down_first() -> None:
    limiter, spec = CgroupV2(Path("/c")), EmulateSpec(speeds=(0.4,), memory=(1 << 30,))
    handed = controller_settings(limiter, "run", spec)
    settings = handed + speed_settings(limiter, "run", 0, 0.4) + memory_settings(limiter, "run", 0, 1 << 30)
    assert [(str(setting.path), setting.text) for setting in settings] == [
        ("/c/cgroup.subtree_control", "+cpu +memory"),
        ("/c/run/cgroup.subtree_control", "+cpu +memory"),
        ("/c/run/rank0/cpu.max", "4000 10000"),
        ("/c/run/rank0/memory.max", "1073741824"),
        ("/c/run/rank0/memory.swap.max", "0"),
    ]


def test_memory_limits_need_cgroups() -> None:
    with pytest.raises(EnvironmentProblem, match="memory limits need a writable memory cgroup"):
        plan_run(EmulateSpec(speeds=(0.5,), memory=(1 << 30,)), limit="affinity")


def test_a_setting_that_the_kernel_refuses_has_a_hint(tmp_path: Path) -> None:
    Setting(tmp_path / "missing/file", "1", optional=True).write()
    with pytest.raises(EnvironmentProblem, match=r"cannot write '1' to .*\nhint: run as root"):
        Setting(tmp_path / "missing/file", "1").write()


def test_slow_ranks_share_a_core() -> None:
    assert assign_cores((0.8, 0.4, 0.2, 0.2), (0, 1, 2, 3)) == (0, 1, 1, 1)
    assert shared_speeds((0, 1, 1, 1)) == (1.0, 1 / 3, 1 / 3, 1 / 3)
    assert assign_cores((0.5, 0.5), (4,)) == (4, 4)


def test_one_node_needs_no_network() -> None:
    assert network_commands("run", EmulateSpec(speeds=(0.5, 0.5))) == ()


def test_two_nodes_stand_at_the_ends_of_one_limited_cable() -> None:
    spec = EmulateSpec(speeds=(0.5, 0.5), num_nodes=2, link_bits_per_second=200e6)
    assert [" ".join(command) for command in network_commands("run", spec)] == [
        "ip netns add run-node0",
        "ip netns add run-node1",
        "ip link add name eth0 netns run-node0 type veth peer name eth0 netns run-node1",
        "ip -n run-node0 address add 10.77.0.1/24 dev eth0",
        "ip -n run-node0 link set lo up",
        "ip -n run-node0 link set eth0 up",
        "tc -n run-node0 qdisc add dev eth0 root tbf rate 200000000bit burst 250000 latency 100ms",
        "ip -n run-node1 address add 10.77.0.2/24 dev eth0",
        "ip -n run-node1 link set lo up",
        "ip -n run-node1 link set eth0 up",
        "tc -n run-node1 qdisc add dev eth0 root tbf rate 200000000bit burst 250000 latency 100ms",
    ]


def test_more_nodes_meet_at_a_bridge_limited_both_ways() -> None:
    spec = EmulateSpec(speeds=(0.5,) * 3, num_nodes=3, link_bits_per_second=1e6)
    commands = [" ".join(command) for command in network_commands("run", spec)]
    assert "ip -n run-bridge link add br0 type bridge" in commands
    limited = [command.split()[2:7] for command in commands if "tbf" in command]
    assert [words[0] for words in limited].count("run-bridge") == 3
    assert [words[4] for words in limited].count("eth0") == 3


def test_a_network_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(EnvironmentProblem, match="'sh -c echo no such device >&2; exit 3' said: no such device"):
        run_command(("sh", "-c", "echo no such device >&2; exit 3"))


def test_a_rank_gets_a_launchers_environment() -> None:
    plan = plan_run(EmulateSpec(speeds=(0.5, 0.25)), limit="affinity", port=1234)
    environment = dict(plan.ranks[1].environment)
    assert {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "1234",
    }.items() <= environment.items()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HETU_FX_EMULATED_SPEEDS"] == "0.5,0.25"
    assert int(environment["MALLOC_TRIM_THRESHOLD_"]) > 1 << 32


def test_the_dry_run_lists_every_step_and_touches_nothing() -> None:
    plan = plan_run(EmulateSpec(speeds=(0.5, 0.25)), limit="affinity")
    lines = list(plan.lines(["python", "train.py"]))
    assert lines[0].startswith("# 2 ranks of 0.5, 0.25 cores; by CPU affinity (asked for)")
    assert [line.endswith("python train.py &") for line in lines[1:]] == [True, True]
    assert not Path(f"/run/netns/{plan.name}").exists()


def test_affinity_says_the_speeds_it_makes() -> None:
    plan = plan_run(EmulateSpec(speeds=(0.8, 0.8)), limit="affinity")
    assert "speeds are about 1, 1 cores" in describe(plan) or "0.5, 0.5 cores" in describe(plan)


@pytest.mark.parametrize(
    ("command", "said"),
    [([], "no command to run"), (["no-such-program"], "'no-such-program' is not to be found")],
)
def test_a_command_that_cannot_start_is_refused(command: list[str], said: str) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        run(EmulateSpec(speeds=(0.1,)), command)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """Make the control folder of a run of two ranks by version 2 quotas, in plain files."""
    for rank in range(2):
        (tmp_path / f"run/rank{rank}").mkdir(parents=True)
    state = {
        "name": "run",
        "kind": "CgroupV2",
        "bases": [str(tmp_path)],
        "speeds": [0.5, 0.5],
        "num_cores": 2,
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    return tmp_path


def test_a_changed_speed_is_written_and_remembered(control: Path) -> None:
    change_speed(1, 0.25, control)
    assert (control / "run/rank1/cpu.max").read_text() == "2500 10000"
    assert current_speeds(control) == (0.5, 0.25)


def test_ranks_whose_speeds_are_lifted_have_all_cores_until_they_are_given_speeds_again(control: Path) -> None:
    lift_speeds(control)
    assert [(control / f"run/rank{rank}/cpu.max").read_text() for rank in range(2)] == ["20000 10000"] * 2
    for rank, speed in enumerate((1.5, 0.25)):
        change_speed(rank, speed, control)
    assert current_speeds(control) == (1.5, 0.25)


@pytest.mark.parametrize(
    ("rank", "speed", "said"),
    [
        (2, 0.1, "no rank 2 to change"),
        (0, -1.0, "speed -1 of rank 0"),
        (0, 1.6, "must sum to less than the 2 cores"),
    ],
)
def test_a_speed_that_cannot_be_is_refused_and_changes_nothing(
    control: Path, rank: int, speed: float, said: str
) -> None:
    with pytest.raises(EnvironmentProblem, match=said):
        change_speed(rank, speed, control)
    assert current_speeds(control) == (0.5, 0.5)


def test_speeds_by_affinity_cannot_be_changed(control: Path) -> None:
    state = json.loads((control / "state.json").read_text())
    (control / "state.json").write_text(json.dumps({**state, "kind": "Affinity", "bases": []}))
    with pytest.raises(EnvironmentProblem, match="only CPU quotas change"):
        change_speed(0, 0.1, control)


def test_a_run_that_is_over_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no running emulation in"):
        change_speed(0, 0.1, tmp_path / "gone")


def test_a_run_is_dead_when_its_process_is_another_or_gone() -> None:
    name = run_name(0)
    prefix, pid, start, serial = name.rsplit("-", 3)
    assert not is_dead(name)
    assert is_dead(f"{prefix}-{pid}-{int(start) + 1}-{serial}")
    assert not is_dead("somebody-else")
    assert start_time(2**22 + 1) is None  # above the largest pid there is


def test_leftovers_of_dead_runs_are_swept_and_of_living_ones_kept(tmp_path: Path) -> None:
    living = run_name(99)
    prefix, pid, start, serial = living.rsplit("-", 3)
    dead = f"{prefix}-{pid}-{int(start) + 1}-{serial}"
    for name in (living, dead):
        (tmp_path / name / "rank0").mkdir(parents=True)
    assert dead in sweep([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == [living]
    remove_run(living, [tmp_path])
    assert not list(tmp_path.iterdir())
