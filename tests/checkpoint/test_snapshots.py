"""`model.hetu.snapshots` in one process: what a run needs to go on, and what it says where it cannot."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.checkpoint import joining, snapshot_files
from hetu_fx.checkpoint.snapshots import Snapshots, Wait
from hetu_fx.errors import CheckpointError, StateError

STEPS = 6


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.dropout(self.up(x))) * self.scale, y)


class Run:
    """A training run that can be broken off and begun anew."""

    def __init__(self, folder: Path, width: int = 8, **options: Any) -> None:
        torch.manual_seed(2)
        self.model = Net(width).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.model = hetu_fx.auto_parallelize(
            self.model, batch(0), plan=hetu_fx.Plan.single(0), optimizer=self.optimizer, seed=3
        )
        self.snapshots: Snapshots = self.model.hetu.snapshots(self.optimizer, folder=folder, **options)

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)
        self.snapshots.wait()

    def step(self, number: int) -> None:
        self.model(**batch(number)).backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.snapshots.step({"batch": number + 1, "schedule": self.schedule.state_dict()})

    @property
    def state(self) -> list[torch.Tensor]:
        moments = [s[key] for s in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [p.detach() for p in self.model.parameters()] + moments


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(6, size, generator=generator).double() for name, size in (("x", 4), ("y", 2))}


def assert_equal(one: Run, other: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.state, other.state, strict=True))


def test_a_run_that_is_begun_anew_goes_on_exactly(tmp_path: Path) -> None:
    whole, broken, after = Run(tmp_path / "whole"), Run(tmp_path / "broken"), Run(tmp_path / "broken")
    whole.train(0, STEPS)
    broken.train(0, 4)
    resumed = after.snapshots.resume()
    assert (resumed.source, resumed.step, resumed.extra["batch"]) == ("memory", 4, 4)
    after.schedule.load_state_dict(resumed.extra["schedule"])
    after.train(resumed.extra["batch"], STEPS)
    assert_equal(after, whole)


def test_snapshots_are_taken_every_so_many_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3)
    run.train(0, 5)
    assert run.snapshots.last_step == 3
    assert Run(tmp_path).snapshots.resume().extra["batch"] == 3


@pytest.mark.parametrize(
    ("wait", "seconds_of_one", "is_whole"),
    [(True, 1e6, True), ("cheap", 0.0, True), ("cheap", 1e6, False), (False, 0.0, False)],
)
def test_a_snapshot_is_waited_for_where_it_is_asked_or_cheap(
    tmp_path: Path, wait: Wait, seconds_of_one: float, is_whole: bool
) -> None:
    run, may_write = Run(tmp_path, wait=wait), threading.Event()
    run.snapshots._writer.seconds = seconds_of_one
    write = snapshot_files.SnapshotMemory.write

    def held(*given: Any) -> int:
        assert may_write.wait(60)
        return write(*given)

    with mock.patch.object(snapshot_files.SnapshotMemory, "write", held):
        if is_whole:
            threading.Timer(0.05, may_write.set).start()
        run.step(0)
        assert run.snapshots.last_step == (1 if is_whole else None)
        may_write.set()
        run.snapshots.wait()
    assert run.snapshots.last_step == 1


def test_another_way_to_wait_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="wait='often' is not known"):
        Run(tmp_path, wait="often")


@pytest.fixture
def another_is_ready() -> Iterator[None]:
    joining.asked.set()
    yield
    joining.asked.clear()


@pytest.mark.usefixtures("another_is_ready")
def test_where_a_process_joins_the_script_ends_at_a_step_that_it_goes_on_from(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3)
    with pytest.raises(joining.Joining, match="after step 1"):
        run.train(0, STEPS)
    assert Run(tmp_path).snapshots.resume().extra["batch"] == 1


@pytest.mark.usefixtures("another_is_ready")
def test_a_step_that_cannot_be_kept_is_not_the_one_where_a_process_joins(tmp_path: Path) -> None:
    run = Run(tmp_path)
    writer = run.snapshots._writer
    writer.memory, there = snapshot_files.SnapshotMemory(tmp_path / "gone"), writer.memory
    run.train(0, 1)
    writer.memory = there
    with pytest.raises(joining.Joining, match="after step 2"):
        run.train(1, STEPS)


def test_what_cannot_be_kept_is_told_once_with_what_it_needs_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    writer = run.snapshots._writer
    writer.memory, there = snapshot_files.SnapshotMemory(tmp_path / "gone"), writer.memory
    run.train(0, 3)
    assert len(caplog.records) == 1
    told = f"this snapshot is given up: cannot write a snapshot to {tmp_path / 'gone'}: "
    assert re.search(re.escape(told) + r".*; it needs 1.4\d kB, and 0 bytes are free\n", caplog.text)
    writer.memory = there
    run.train(3, 5)
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "rank 0: snapshots are taken again, from step 4 on"
    ]


def test_random_numbers_of_torch_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0, 1)
    expected = torch.rand(3)
    torch.manual_seed(77)
    Run(tmp_path).snapshots.resume()
    assert torch.equal(torch.rand(3), expected)


def test_without_anything_to_go_on_from_a_run_starts(tmp_path: Path) -> None:
    resumed = Run(tmp_path).snapshots.resume()
    assert (resumed.source, resumed.step, resumed.extra) == ("start", 0, {})


def test_what_is_in_no_memory_is_named_and_the_last_checkpoint_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "memory")
    run.train(0, 2)
    run.model.hetu.save(tmp_path / "saved" / "step_2", optimizer=run.optimizer, extra={"batch": 2})
    run.train(2, 4)
    (part,) = (tmp_path / "memory").rglob("*.safetensors")
    part.rename(part.with_name(part.name.replace("of-00001", "of-00002")))  # as if rank 1 of 2 were gone
    after = Run(tmp_path / "memory", checkpoints=tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        resumed = after.snapshots.resume()
    assert (resumed.source, resumed.step, resumed.extra) == ("checkpoint", 2, {"batch": 2})
    assert "snapshot of step 4 is lost: the parts of ranks [1] of 2 are in no memory" in caplog.text
    assert "step_2" in caplog.text
    after.train(2, 4)
    assert_equal(after, run)


def test_a_checkpoint_of_a_later_step_is_taken_before_an_old_snapshot(tmp_path: Path) -> None:
    old, later = Run(tmp_path / "memory"), Run(tmp_path / "elsewhere")
    old.train(0, 1)
    later.train(0, 3)
    later.model.hetu.save(tmp_path / "saved" / "last", optimizer=later.optimizer)
    after = Run(tmp_path / "memory", checkpoints=tmp_path / "saved")
    resumed = after.snapshots.resume()
    assert (resumed.source, resumed.step) == ("checkpoint", 3)
    assert_equal(after, later)


def test_a_damaged_part_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Run(tmp_path / "memory", checkpoints=tmp_path / "saved")
    broken.train(0, 1)
    broken.model.hetu.save(tmp_path / "saved" / "step-1", optimizer=broken.optimizer)
    at_step_1 = [value.clone() for value in broken.state]
    broken.train(1, 3)
    (part,) = (tmp_path / "memory").rglob("*.safetensors")
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    after = Run(tmp_path / "memory", checkpoints=tmp_path / "saved")
    with caplog.at_level(logging.WARNING, "hetu_fx"):
        resumed = after.snapshots.resume()
    assert resumed.source == "checkpoint"
    assert all(torch.equal(a, b) for a, b in zip(after.state, at_step_1, strict=True))
    assert "a part of a snapshot is left out" in caplog.text
    assert "is damaged: the sum of bytes" in caplog.text


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).train(0, 1)
    with pytest.raises(CheckpointError, match=r"is of another model, which differs in .*down\.weight"):
        Run(tmp_path, width=9).snapshots.resume()


def test_a_finished_run_frees_the_memory_and_a_failed_one_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path / "memory")
    run.train(0, 1)
    with pytest.raises(ZeroDivisionError), run.snapshots:
        raise ZeroDivisionError
    assert list((tmp_path / "memory").rglob("*.safetensors"))
    with run.snapshots:
        run.train(1, 2)
    assert not (tmp_path / "memory").exists()


def test_snapshots_after_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="every 0 steps"):
        Run(tmp_path, every=0)
