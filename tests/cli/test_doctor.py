"""The doctor finds what is wrong, says what to do, and asks two processes about what one cannot know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hetu_fx
from hetu_fx.base import frameworks
from hetu_fx.base.frameworks import numbers
from hetu_fx.cli.doctor import (
    SETTINGS,
    launch_finding,
    nccl_of,
    package_finding,
    settings_finding,
    split_requirement,
    trial_findings,
)
from hetu_fx.cli.finding import Finding, conclusion, make_finding
from hetu_fx.cli.job_checks import clock_finding, link_findings, speed_finding, versions_finding
from hetu_fx.cli.main import main
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import Device, Link

LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun --nproc-per-node 2 SCRIPT"}


def test_this_machine_is_looked_at_and_told_as_lines_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    torch: 2.") for line in lines)
    assert "fine" in lines[-1] or "doubtful" in lines[-1]
    assert main(["doctor", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "launch", "address", "memory"} <= {finding["what"] for finding in told["findings"]}


def test_whatever_is_not_fine_has_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--quick", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert all((finding["state"] == "fine") == (finding["way_out"] == "") for finding in findings)


def test_requirements_are_read_from_the_package() -> None:
    assert split_requirement("torch<2.14,>=2.11") == ("torch", [("<", "2.14"), (">=", "2.11")], "")
    assert split_requirement('accelerate>=1.15; extra == "hf"') == ("accelerate", [(">=", "1.15")], "hf")
    assert numbers("2.13.0+cpu") == (2, 13, 0)


@pytest.mark.parametrize(
    ("version", "is_needed", "state"),
    [("2.12.1", True, "fine"), ("2.14.0", True, "wrong"), ("2.9", True, "wrong"), ("", True, "wrong"),
     ("", False, "fine"), ("2.9", False, "doubtful")],
)  # fmt: skip
def test_versions_are_held_against_their_bounds(version: str, is_needed: bool, state: str) -> None:
    found = package_finding("torch", [(">=", "2.11"), ("<", "2.14")], version, is_needed=is_needed)
    assert found.state == state
    assert ("pip install 'torch>=2.11,<2.14'" in found.way_out) == (state != "fine")


def test_a_torch_above_the_newest_tested_is_doubtful_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "NEWEST", {"torch": "2.14"})
    found = package_finding("torch", [(">=", "2.11")], "2.15.0", is_needed=True)
    assert found.state == "doubtful"
    assert "newest that was tested" in found.says
    assert "'torch<2.15'" in found.way_out
    assert package_finding("torch", [(">=", "2.11")], "2.14.9", is_needed=True).state == "fine"


@pytest.mark.parametrize(
    ("version", "setting", "is_new"),
    [("2.13.0", "1", False), ("2.14.1", None, False), ("2.14.1", "1", True), ("2.15.0", None, True),
     ("2.15.0", "0", False)],
)  # fmt: skip
def test_which_backend_nccl_stands_for_is_told(version: str, setting: str | None, is_new: bool) -> None:
    environment = {} if setting is None else {"TORCH_DIST_USE_NCCL2": setting}
    assert nccl_of(version, environment).startswith("nccl2") == is_new


def test_a_launch_that_lacks_something_or_started_one_process_is_told() -> None:
    assert launch_finding({}, LAUNCHERS).state == "fine"
    assert launch_finding({"WORLD_SIZE": "2", "RANK": "0"}, LAUNCHERS).state == "wrong"
    whole = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert launch_finding(whole, LAUNCHERS).state == "fine"
    alone = launch_finding({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, LAUNCHERS)
    assert alone.state == "doubtful"
    assert "torchrun --nproc-per-node 2" in alone.way_out


def test_a_misspelt_setting_is_told_with_the_known_one() -> None:
    found = settings_finding(["HETU_FX_WAIT_SECOND"])
    assert "did you mean 'HETU_FX_WAIT_SECONDS'" in found.way_out
    assert settings_finding(["HETU_FX_NODE"]).state == "fine"


def test_all_settings_that_the_code_reads_are_known() -> None:
    root = Path(hetu_fx.__file__).parents[1]
    folders = ("hetu_fx", "comm_ops", "transforms", "switching", "integrations")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    read = {name for file in files for name in re.findall(r"\bHETU_FX_[A-Z_]+\b", file.read_text())}
    assert sorted(name for name in read if not name.endswith("_")) == list(SETTINGS)


def test_ranks_with_unlike_versions_are_wrong_and_clocks_apart_are_doubtful() -> None:
    assert versions_finding([{"torch": "2.13"}, {"torch": "2.12"}]).state == "wrong"
    assert versions_finding([{"torch": "2.13"}] * 2).state == "fine"
    assert clock_finding([0.0, -3.0]).state == "doubtful"
    assert clock_finding([0.0, 0.01]).says == "within 10 ms"


def test_unequal_devices_are_no_fault_and_slow_links_are_doubtful() -> None:
    devices = (Device(0, "cpu", "a", 4e9, 1 << 30), Device(1, "cpu", "b", 1e9, 1 << 30))
    cluster = Cluster(devices, Link(1e9, 1e-5), Link(1e6, 1e-3))
    assert speed_finding(cluster).state == "fine"
    assert "4 : 1" in speed_finding(cluster).says
    assert [finding.state for finding in link_findings(cluster)] == ["fine", "doubtful"]


def test_two_processes_that_fail_are_wrong_with_the_last_that_they_said() -> None:
    (found,) = trial_findings("", "first\nlast\n")
    assert found.state == "wrong"
    assert found.says == "failed: last"
    told = json.dumps({"findings": [make_finding("clocks", "fine").to_json(), make_finding("python", "3").to_json()]})
    assert [finding.what for finding in trial_findings(told, "")] == ["two processes", "clocks"]


def test_findings_are_summed_up() -> None:
    findings = [Finding("a", "fine", ""), Finding("b", "wrong", "", "do"), Finding("c", "doubtful", "", "see")]
    assert conclusion(findings) == "1 wrong, 1 doubtful, of 3"
    assert str(findings[1]) == "WRONG b: \n      -> do"


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_processes_are_started_and_tell_of_clocks_speeds_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    told = {finding["what"]: finding["state"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert told["two processes"] == "fine"
    assert {"versions of all ranks", "clocks", "speeds", "links within a node"} <= told.keys()
