"""Runs that lose processes end as those of one process without faults do, under our launcher and under torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import check, check_steps, without_faults
from tests.chaos_faults import Decks
from tests.chaos_job import SCRIPT, set_steps
from tests.chaos_kinds import EARLY, KINDS, LATER, Fault
from tests.chaos_nodes import NodeFault, node_summary, print_node_table
from tests.chaos_record import ChaosError, Lines, Record, Span
from tests.chaos_report import print_table, steps_lost_at, summary

STEPS = 12
SECONDS = 900  # a machine may be busy; it is no measurement


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS)
def test_a_run_with_faults_at_random_moments_is_that_without() -> None:
    kinds = ("kill", "nan", "full", "slow network", "full memory", "out of memory")
    words = ["--faults", str(len(kinds)), "--seed", "3", "--stopped-after", "10", "--hang-after", str(SECONDS // 4)]
    command = [sys.executable, "-m", "tests.chaos", *words, "--kinds", *kinds]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS - 60, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    made = json.loads(ended.stdout.splitlines()[-1])
    assert {*made["kinds"], *made["left_out"]} == {*kinds}
    assert made["faults"] == len(kinds)


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_under_torchrun_a_lost_process_costs_no_finished_step(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "restarted"
    folder.mkdir()
    set_steps(folder, STEPS)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    process = subprocess.Popen([*launch, str(SCRIPT), str(folder)], start_new_session=True)
    try:
        progress = Lines(folder / "progress.jsonl")
        killed_at = lose_one_after(4, number, folder, progress, process)
        assert process.wait(timeout=SECONDS / 2) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
    resumed = [line for line in progress() if "resumed" in line]
    assert [line["source"] for line in resumed] == ["start", "memory"]
    assert resumed[1]["resumed"] >= killed_at
    expected = without_faults(tmp_path / "right", STEPS)
    check(json.loads((folder / "result.json").read_text()), progress(), *expected)


def test_every_kind_is_dealt_before_one_comes_again_and_every_phase_of_a_kind() -> None:
    decks = Decks(KINDS, random.Random(1))
    for _ in range(3):
        assert {decks.kind() for _ in KINDS} == set(KINDS)
    assert {decks.phase("kill", may_be_early=True) for _ in (*LATER, *EARLY)} == {*LATER, *EARLY}


def test_early_phases_wait_for_a_moment_at_which_they_may_be() -> None:
    decks = Decks(KINDS, random.Random(1))
    assert not {decks.phase("kill", may_be_early=False) for _ in range(20)} & set(EARLY)
    assert {decks.phase("kill", may_be_early=True) for _ in range(20)} >= set(EARLY)


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ([{"step": 1}, {"step": 3}], "step 3 follows step 1"),
        ([{"step": 1}, {"resumed": 0}, {"step": 2}], "step 2 follows step 0"),
        ([{"step": 1}, {"rolled_back": 2}], "went on from step 2, and only 1 are done"),
    ],
)
def test_batches_that_are_lost_or_repeated_are_told(told: list[dict[str, int]], what: str) -> None:
    assert check_steps([{"resumed": 0}, {"step": 1}, {"step": 2}, {"rolled_back": 1}, {"step": 2}]) == 2
    with pytest.raises(ChaosError, match=what):
        check_steps(told)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A run with a step each second from 11 on; a process is lost at 12.5, and what is lost comes back at 16.2."""
    events = [
        {"event": "start", "seconds": 10.0, "number": 0, "workers": [1, 2, 3]},
        {"event": "lost", "seconds": 12.75, "worker": 3, "reason": "killed"},
        {"event": "start", "seconds": 13.0, "number": 1, "workers": [1, 2]},
        {"event": "start", "seconds": 16.2, "number": 2, "workers": [1, 2, 4]},
    ]
    progress = [
        {"seconds": 10.5, "resumed": 0, "source": "start"},
        *({"seconds": 10.0 + step, "step": step, "finished": step} for step in (1, 2)),
        {"seconds": 13.5, "resumed": 1, "source": "memory"},
        *({"seconds": 12.0 + step, "step": step, "finished": step} for step in (2, 3, 4)),
        {"seconds": 16.5, "resumed": 4, "source": "memory"},
        *({"seconds": 12.0 + step, "step": step, "finished": step} for step in (5, 6)),
        {"seconds": 22.0, "step": 7, "finished": 7},
        {"seconds": 23.0, "step": 8, "finished": 8},
    ]
    for name, lines in (("events", events), ("progress", progress)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Record(tmp_path)


def test_a_report_tells_times_steps_lost_and_what_a_bad_network_costs(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    record.bad_network.append(Span(18.5, 21.5))
    faults = [Fault("kill", "sync", (3,), 12.5, 13.1), Fault("slow network", "save", (1,), 18.5, 22.0)]
    made = summary(faults, record)
    kill, slow = made["kinds"]["kill"], made["kinds"]["slow network"]
    assert (kill["detect_seconds"]["p50"], kill["regroup_seconds"]["p50"], kill["resume_seconds"]["p95"]) == (
        0.25, 0.5, 1.5,
    )  # fmt: skip
    assert (kill["steps_lost"], kill["sources"], kill["phases"]) == (1, {"memory": 1}, {"sync": 1})
    assert slow["pause_seconds"]["p50"] == made["bad_network_step_seconds"]["p50"] == 4.0
    assert made["step_seconds"]["p95"] == made["join_seconds"]["p50"] == 1.0
    assert made["ettr_at_one_fault_per_15_s"] == pytest.approx(1 - (1.5 + 1.0 + 1.0) / 15)
    print_table({"failure": "interrupted", "worst_difference": None, "faults": 2, "steps": 9, **made})
    printed = capsys.readouterr().out
    assert "FAILED: interrupted" in printed
    assert "went on from memory 1" in printed


def test_a_step_whose_snapshot_was_not_whole_yet_is_not_a_finished_one(tmp_path: Path) -> None:
    start = {"event": "start", "seconds": 13.0, "number": 1, "workers": [1, 2]}
    done = {"seconds": 11.0, "step": 1, "finished": 1}
    resumed = {"seconds": 13.5, "resumed": 1, "source": "memory"}
    lost = []
    for finished in ({}, {"finished": 2}):
        lines = (done, {"seconds": 12.0, "step": 2, **finished}, resumed)
        (tmp_path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lost.append(steps_lost_at(start, Record(tmp_path)))
    assert lost == [0, 1]


def test_a_report_of_a_run_without_a_step_has_no_useful_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = summary([], Record(tmp_path))
    assert "ettr" not in made
    print_table({"failure": "interrupted", "worst_difference": None, "faults": 0, "steps": 0, **made})
    assert "0 faults in 0 steps" in capsys.readouterr().out


def test_a_report_of_machines_tells_times_bars_and_finished_steps_that_are_done_again(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = NodeFault("kill", "one", 12.5, notice=0.7, resume=3.5, rejoin=1.0, world=2)
    cut = NodeFault("cut", "two", 15.5, resume=1.5, speaks=2.0, world=2)
    made = node_summary([kill, cut], record)
    assert (made["kinds"]["kill"]["steps_lost"], made["kinds"]["cut"]["steps_lost"]) == (1, 0)
    assert made["kinds"]["cut"]["sources"] == {"memory": 1}
    assert made["bars"]["kill, resume"] == {"bar": 3.0, "p95": 3.5, "holds": False}
    assert made["bars"]["cut, speaks"]["holds"]
    about = {"failure": "1 finished steps were lost", "worst_difference": 0.0, "load": [0.5, 1.0]}
    print_node_table({**about, "faults": 2, "steps": 9, **made})
    printed = capsys.readouterr().out
    assert "FAILED: 1 finished steps were lost" in printed
    assert "kill, resume: p95 3.50 s, bar 3 s: missed" in printed
    assert "load average 0.5 to 1.0" in printed


def lose_one_after(
    steps: int, number: signal.Signals, folder: Path, progress: Lines, process: subprocess.Popen[bytes]
) -> int:
    """Signal a process once so many steps are done and the snapshot of the one before is whole; returns its step."""
    deadline = time.monotonic() + SECONDS / 3
    while sum("step" in line for line in progress()) < steps:
        assert time.monotonic() < deadline, "no steps"
        assert process.poll() is None, "torchrun has ended"
        time.sleep(0.005)
    victim = max(folder.glob("phase_*"))
    os.kill(int(victim.name.removeprefix("phase_")), number)
    return steps - 1
