"""Emulated devices, run: real processes in real cgroups and namespaces, and nothing of them left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.cleanup import NAMESPACES, RUN_NAME
from hetu_fx_emulate.emulate import EmulateSpec, Output, change_speed, current_speeds, run
from hetu_fx_emulate.limits import Affinity, cgroup_bases, this_limiter

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

LIMITER = this_limiter()
needs_quotas = pytest.mark.skipif(isinstance(LIMITER, Affinity), reason="no writable cgroups here")
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"), reason="needs root and iproute2"
)
FOREVER = "exec sleep 100000"
REPORT = """
import json, os, pathlib, sys
control = os.environ.get("HETU_FX_EMULATE_CONTROL")
report = {"environment": dict(os.environ), "cores": sorted(os.sched_getaffinity(0)), "files": {}}
state = json.loads(pathlib.Path(control, "state.json").read_text())
for base in state["bases"]:
    for path in pathlib.Path(base, state["name"], "rank" + os.environ["RANK"]).iterdir():
        if path.name.startswith(("cpu.", "memory.max", "memory.limit", "cgroup.procs")):
            report["files"][path.name] = path.read_text().split()
report["pid"] = os.getpid()
report["net"] = pathlib.Path("/proc/net/dev").read_text()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(report))
"""


def leftovers(pid: int) -> list[Path]:
    """List what the runs of process `pid` have left on the machine."""
    places = (*cgroup_bases(LIMITER), NAMESPACES, Path(tempfile.gettempdir()))
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    return [path for path in found if (match := RUN_NAME.match(path.name)) and int(match[2]) == pid]


def report(spec: EmulateSpec, folder: Path, **options: object) -> list[dict[str, object]]:
    """Run the reporting program under an emulation; give what each rank saw."""
    assert run(spec, [sys.executable, "-c", REPORT, str(folder)], **options) == 0  # type: ignore[arg-type]
    assert not leftovers(os.getpid())
    return [json.loads((folder / str(rank)).read_text()) for rank in range(spec.world_size)]


@pytest.fixture
def emulation() -> Iterator[subprocess.Popen[str]]:
    """Start an emulation of two ranks that never end, and wait until both are there."""
    arguments = ["emulate", "--speeds", "0.2,0.1", "--no-prefix"]
    script = f'echo "$HETU_FX_EMULATE_CONTROL"; sleep 100000 & {FOREVER}'
    process = subprocess.Popen(
        [sys.executable, "-m", "hetu_fx.cli", *arguments, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.terminate()
    read_to_the_end(process)
    assert not leftovers(process.pid)


def read_to_the_end(process: subprocess.Popen[str]) -> None:
    """Wait until the emulator, its ranks and its janitor are gone: all of them hold the pipe."""
    assert process.stdout is not None
    process.stdout.read()
    process.wait()


def control_of(process: subprocess.Popen[str]) -> Path:
    """Read the control folder that each of the two ranks prints as it starts."""
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    assert first == second
    return Path(first.strip())


@needs_quotas
def test_every_rank_runs_in_its_cgroup_with_its_quota(tmp_path: Path) -> None:
    reports = report(EmulateSpec(speeds=(0.2, 0.1), memory=(1 << 30, 1 << 29)), tmp_path)
    for seen, quota, size in zip(reports, ("2000", "1000"), (1 << 30, 1 << 29), strict=True):
        files = seen["files"]
        assert isinstance(files, dict)
        assert str(seen["pid"]) in files["cgroup.procs"]
        assert files.get("cpu.max") == [quota, "10000"] or files["cpu.cfs_quota_us"] == [quota]
        assert [str(size)] in (files.get("memory.max"), files.get("memory.limit_in_bytes"))


def test_without_quotas_every_rank_is_pinned_and_we_are_not(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    reports = report(EmulateSpec(speeds=(0.4, 0.2, 0.2)), tmp_path, limit="affinity")
    cores = [seen["cores"] for seen in reports]
    assert cores[1] == cores[2]
    assert all(isinstance(core, list) and len(core) == 1 for core in cores)
    assert os.sched_getaffinity(0) == before


@needs_quotas
@needs_namespaces
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_nodes_see_their_own_network_only(tmp_path: Path, num_nodes: int) -> None:
    spec = EmulateSpec(speeds=(0.2,) * 3, num_nodes=num_nodes, link_bits_per_second=100e6)
    for seen in report(spec, tmp_path):
        names = {line.split(":")[0].strip() for line in str(seen["net"]).splitlines() if ":" in line}
        assert {"lo", "eth0"} <= names
        environment = seen["environment"]
        assert isinstance(environment, dict)
        assert environment["MASTER_ADDR"] == "10.77.0.1"
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"


@needs_quotas
def test_a_running_rank_changes_its_speed(emulation: subprocess.Popen[str]) -> None:
    control = control_of(emulation)
    change_speed(1, 0.05, control)
    assert current_speeds(control) == (0.2, 0.05)
    state = json.loads((control / "state.json").read_text())
    folder = Path(state["bases"][0], state["name"], "rank1")
    texts = {path.name: path.read_text().split() for path in folder.glob("cpu.*") if path.name != "cpu.stat"}
    assert texts.get("cpu.max") == ["1000", "20000"] or texts["cpu.cfs_period_us"] == ["20000"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_and_is_the_status(emulation: subprocess.Popen[str], number: int) -> None:
    control_of(emulation)
    emulation.send_signal(number)
    assert emulation.wait() == 128 + number


def test_a_killed_emulator_leaves_nothing_either(emulation: subprocess.Popen[str]) -> None:
    control = control_of(emulation)
    emulation.kill()
    read_to_the_end(emulation)
    assert not control.exists()


def test_a_rank_that_fails_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    script = f"test $RANK = 1 && exit 7; {FOREVER}"
    assert run(EmulateSpec(speeds=(0.2, 0.1)), ["sh", "-c", script], grace_seconds=0) == 7
    assert "rank 1 ended with status 7" in capfd.readouterr().err
    assert not leftovers(os.getpid())


def test_a_run_over_its_time_ends_with_124(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(EmulateSpec(speeds=(0.2, 0.1)), ["sh", "-c", FOREVER], timeout_seconds=0) == 124
    assert "ranks [0, 1] still run after 0 s" in capfd.readouterr().err


@needs_quotas
def test_a_rank_over_its_memory_is_killed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    spec = EmulateSpec(speeds=(0.2, 0.2), memory=(None, 32 << 20))
    hungry = "import os; x = bytearray(1 << 26) if os.environ['RANK'] == '1' else b''"
    assert run(spec, [sys.executable, "-c", hungry]) == 128 + signal.SIGKILL
    assert "rank 1 was killed by the kernel: it needed more than its 32 MiB" in capfd.readouterr().err


def test_lines_name_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EmulateSpec(speeds=(0.2, 0.1)), ["sh", "-c", "echo hello; echo oh >&2"]) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] hello", "[1] hello"]
    assert {"[0] oh", "[1] oh"} <= set(err.splitlines())


def test_a_hidden_rank_is_shown_when_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    script = "echo hello from $RANK; exit $RANK"
    assert run(EmulateSpec(speeds=(0.2, 0.1)), ["sh", "-c", script], output=Output(only_rank=0)) == 1
    out, err = capsys.readouterr()
    assert out == "[0] hello from 0\n"
    assert "[1] hello from 1" in err.splitlines()


def test_a_machine_that_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The network is the last thing that is made, so everything before it has to be taken back.
    monkeypatch.setattr("hetu_fx_emulate.emulate.run_command", refuse)
    monkeypatch.setattr("hetu_fx_emulate.emulation_plan._check_nodes_possible", lambda: None)
    with pytest.raises(EnvironmentProblem, match="no network today"):
        run(EmulateSpec(speeds=(0.2, 0.1), num_nodes=2), ["true"])
    assert not leftovers(os.getpid())


def refuse(command: object) -> None:
    raise EnvironmentProblem("no network today")
