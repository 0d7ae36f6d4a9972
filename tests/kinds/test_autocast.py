"""A job of unlike types of devices under torch.autocast: all cast what the host casts, and equal one device of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hetu_fx
from hetu_fx.lockstep import move_model
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.kinds import testkind
from tests.model_zoo import causal_batch, llama
from tests.spawned import results_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

TYPES = (testkind.NAME, "cpu")
PLANS = {
    "PP2": Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
    "TP2": Plan.tensor_parallel((0, 1)),
    "DP 3:1": Plan.data_parallel((0, 1), (3, 1)),
}


def model_and_batch() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return llama().float(), causal_batch(4, 13)


def trained(rank: int, folder: Path, results: Any) -> None:
    warnings.simplefilter("ignore")
    testkind.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(TYPES))
    losses = {}
    for name, plan in PLANS.items():
        model, batch = model_and_batch()
        place = torch.device(TYPES[rank])
        there = {key: value.to(place) for key, value in batch.items()}
        model = hetu_fx.auto_parallelize(move_model(model, place), dict(there), plan=plan, data="global")
        optimizer, losses[name] = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            with torch.autocast(place.type, dtype=torch.bfloat16):
                loss = model(**there).loss
            losses[name].append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    results.put((rank, losses))
    dist.barrier()


def alone(*, casts: bool) -> list[float]:
    model, batch = model_and_batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            loss = model(**batch).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_job_of_two_types_under_autocast_equals_one_device_of_the_host(tmp_path: Path) -> None:
    found = results_of(trained, len(TYPES), tmp_path, seconds=200)
    expected, exact = alone(casts=True), alone(casts=False)
    for losses in found.values():
        for name, own in losses.items():
            for step in range(2):
                changed = abs(expected[step] - exact[step])
                assert changed > 0
                assert abs(own[step] - expected[step]) < max(changed, 2e-3), name
