"""Two equal processes with rows of their own: DDP and FSDP2 beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hetu_fx
from benchmarks.equal.contest import Against, Contest, Job, Maker, kept_by, marked_step
from benchmarks.kit.contest import adamw
from benchmarks.kit.models import Size, batch, gpt2, llama

SIZES = Size(width=256, layers=4, rows=16, tokens=128), Size(width=128, layers=2, rows=16, tokens=64)
DDP, FSDP2, ZERO_0, ZERO_1 = "DDP", "FSDP2", "hetu_fx, zero 0", "hetu_fx, zero 1"
APART = "each for itself"  # what a step would take if communication took nothing
COMPILED = "DDP, compiled"
DDP_BAR, FSDP2_BAR, COMPILED_BAR = 0.99, 0.80, 1.00
ZERO_0_MEMORY_BAR, ZERO_1_MEMORY_BAR = 1.00, 0.85

Make = Callable[[], nn.Module]
Rows = Mapping[str, Tensor]


def contest(size: Size) -> Contest:
    """Make the contest of a Llama of a size."""
    make, own = partial(llama, size), own_rows(batch(size.rows, size.tokens))
    bars = [Against((ZERO_0,), DDP, DDP_BAR), Against((ZERO_1,), FSDP2, FSDP2_BAR)]
    made = {**contestants(make, own), FSDP2: partial(fsdp2, make, own), APART: partial(apart, make, own)}
    return Contest(made, bars)


def compiled_contest(size: Size) -> Contest:
    """Make the contest of a Llama of a size, all compiled by inductor."""
    make, own = partial(llama, size), own_rows(batch(size.rows, size.tokens))
    ours = ours_of(make, own, "inductor")
    made = {COMPILED: partial(ddp, make, own, compiles=True), **ours}
    return Contest(made, [Against((name,), COMPILED, COMPILED_BAR) for name in ours])


def memory_contest(*, quick: bool) -> Contest:
    """Make the contest in memory of a GPT-2, of 124 M parameters unless it is to be quick."""
    make = partial(gpt2, 256, 4) if quick else partial(gpt2, 768, 12)
    own = own_rows(batch(8, 128, vocabulary=50257))
    bars = [
        Against((ZERO_0,), DDP, DDP_BAR, ZERO_0_MEMORY_BAR),
        Against((ZERO_1,), DDP, DDP_BAR, ZERO_1_MEMORY_BAR),
    ]
    return Contest(contestants(make, own), bars)


def own_rows(whole: Rows) -> Rows:
    """Return this rank's rows."""
    return {name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in whole.items()}


def contestants(make: Make, own: Rows) -> dict[str, Maker]:
    """Make DDP and ours."""
    return {DDP: partial(ddp, make, own), **ours_of(make, own)}


def ours_of(make: Make, own: Rows, backend: str | None = None) -> dict[str, Maker]:
    """Make ours."""
    return {name: partial(our_job, make, own, zero, backend) for name, zero in ((ZERO_0, 0), (ZERO_1, 1))}


def apart(make: Make, own: Rows) -> Job:
    """Train on this rank's rows alone, with the plain model."""
    return job_of(make(), own)


def job_of(model: nn.Module, own: Rows, run: Any = None) -> Job:
    """Train a model that torch takes care of; `run` stands for it in steps."""
    optimizer = adamw(model)
    return Job(marked_step(model if run is None else run, optimizer, own), partial(kept_by, model, optimizer))


def ddp(make: Make, own: Rows, *, compiles: bool = False) -> Job:
    """Train by DistributedDataParallel."""
    model = DistributedDataParallel(make())
    return job_of(model, own, torch.compile(model) if compiles else None)


def fsdp2(make: Make, own: Rows) -> Job:
    """Train a Llama by fully_shard, block by block."""
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return job_of(model, own)


def our_job(make: Make, own: Rows, zero: int, backend: str | None = None) -> Job:
    """Train by hetu_fx."""
    plain = make()
    optimizer = adamw(plain)
    plan = replace(hetu_fx.Plan.data_parallel(range(dist.get_world_size())), zero=zero)
    model = hetu_fx.auto_parallelize(plain, dict(own), plan=plan, optimizer=optimizer, compile=backend)
    return Job(marked_step(model, optimizer, own), partial(kept_by, model, optimizer))
