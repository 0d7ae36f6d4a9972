"""Ranks that share a GPU: changes of home, snapshots and checkpoints with parameters there; NCCL with one rank.

Two ranks compute on the GPU and one on the host, over gloo: NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetu_fx
from hetu_fx.lockstep import move_model
from hetu_fx.switching.home.ops import HomeTensor
from tests.spawned import free_port, results_of

WORLD, STEPS, WIDTH, SECONDS_IN_ALL = 3, 8, 12, 240
ROWS = hetu_fx.Plan.data_parallel(range(WORLD), (3, 2, 1))
GROUP = hetu_fx.Plan.tensor_parallel(range(WORLD), (2, 1, 1))

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return ((self.outward(x) - y) ** 2).mean()


def device_of(rank: int) -> torch.device:
    return torch.device("cpu" if rank == 1 else "cuda:0")


def data(step: int) -> dict[str, Tensor]:
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def net() -> Net:
    torch.manual_seed(3)
    return Net()


class Run:
    """A model in training on this rank's device, or a plain one on the host."""

    def __init__(self, device: torch.device | None, plan: hetu_fx.Plan = ROWS) -> None:
        self.device = device or torch.device("cpu")
        self.model: Any = move_model(net(), self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        if device is not None:
            options = {"plan": plan, "optimizer": self.optimizer, "data": "global"}
            self.model = hetu_fx.auto_parallelize(self.model, self.batch(0), **options)

    def batch(self, number: int) -> dict[str, Tensor]:
        return {name: value.to(self.device) for name, value in data(number).items()}

    def step(self, number: int) -> float:
        loss = self.model(**self.batch(number))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def state(self) -> list[Tensor]:
        return [whole(t) for p in self.model.parameters() for t in (p, *self._moments(p))]

    def _moments(self, parameter: nn.Parameter) -> list[Tensor]:
        return [self.optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, HomeTensor) else tensor).detach().cpu().clone()


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def plain_state() -> list[Tensor]:
    run = Run(None)
    for number in range(STEPS):
        run.step(number)
    return run.state


def check_changes_of_home_beside_steps_and_at_once_train_as_one_device(rank: int, world: int, folder: Path) -> None:
    expected = plain_state()
    for overlap in (False, True):
        run = Run(device_of(rank))
        run.model.hetu.add_variant(GROUP, "group")
        changes = {2: [2, 1], 4: "group", 6: {0: 1.0, 1: 2.0}}
        for number in range(STEPS):
            if number in changes:
                run.model.hetu.switch_home(changes[number], overlap=overlap)
            if number == 3:
                run.model.hetu.switch("group")
            run.step(number)
        assert {p.local.device for p in run.model.parameters()} == {run.device}
        assert_equal(run.state, expected)


def check_a_snapshot_is_gone_on_from(rank: int, world: int, folder: Path) -> None:
    run = Run(device_of(rank))
    snapshots = run.model.hetu.snapshots(run.optimizer, every=2, folder=folder / "snapshots")
    for number in range(5):
        run.step(number)
        snapshots.step({"batch": number + 1})
    snapshots.wait()
    after = Run(device_of(rank))
    first = after.model.hetu.snapshots(after.optimizer, every=2, folder=folder / "snapshots").resume().extra["batch"]
    assert first == 4
    for number in range(first, STEPS):
        after.step(number)
    assert_equal(after.state, plain_state())


def check_what_is_saved_is_loaded_under_another_plan(rank: int, world: int, folder: Path) -> None:
    run = Run(device_of(rank))
    for number in range(4):
        run.step(number)
    run.model.hetu.save(folder / "saved", optimizer=run.optimizer)
    other = Run(device_of(rank), GROUP)
    other.model.hetu.load(folder / "saved", optimizer=other.optimizer)
    for number in range(4, STEPS):
        other.step(number)
    assert_equal(other.state, plain_state())


CHECKS = [name for name in globals() if name.startswith("check_")]


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS_IN_ALL + 60)
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks_of_a_gpu_and_one_of_the_host(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, SECONDS_IN_ALL)[name] if report]
    assert not failures, "\n".join(failures)


def train_over_nccl(rank: int, port: str, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, timeout=timedelta(seconds=60))
    run = Run(torch.device("cuda:0"), hetu_fx.Plan.single(0))
    for number in range(STEPS):
        run.step(number)
    results.put((rank, [t.tolist() for t in run.state]))
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_one_rank_trains_over_nccl() -> None:
    found = results_of(train_over_nccl, 1, free_port(), seconds=150)[0]
    assert_equal([torch.tensor(values, dtype=torch.float64) for values in found], plain_state())
