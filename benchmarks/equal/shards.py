"""Two equal processes that share every layer: DTensor's tensor parallelism beside ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hetu_fx
from benchmarks.equal.contest import Against, Contest, Job, kept_by, marked_step
from benchmarks.equal.replicas import Rows
from benchmarks.kit.contest import adamw
from benchmarks.kit.models import Size, batch, llama

THEIRS, COMPILED, OURS = "DTensor", "DTensor, compiled", "hetu_fx"
TIME_BAR = 0.75
STYLES = {
    **{f"self_attn.{name}_proj": ColwiseParallel for name in ("q", "k", "v")},
    "self_attn.o_proj": RowwiseParallel,
    **{f"mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel,
}
"""Megatron's way through a layer of a Llama, as torch's own tutorial writes it."""


def contest(size: Size) -> Contest:
    """Make the contest of a Llama of a size; all ranks have all rows."""
    rows = batch(size.rows, size.tokens)
    made = {THEIRS: partial(dtensor_job, size, rows), OURS: partial(our_job, size, rows)}
    return Contest(made, [Against((OURS,), THEIRS, TIME_BAR)])


def compiled_contest(size: Size) -> Contest:
    """Make the same contest, compiled by inductor."""
    rows = batch(size.rows, size.tokens)
    made = {COMPILED: partial(dtensor_job, size, rows, compiles=True), OURS: partial(our_job, size, rows, "inductor")}
    return Contest(made, [Against((OURS,), COMPILED, TIME_BAR)])


def dtensor_job(size: Size, rows: Rows, *, compiles: bool = False) -> Job:
    """Train by parallelize_module."""
    model: nn.Module = llama(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in STYLES.items()})
    optimizer = adamw_by_kind(model)
    run: Any = torch.compile(model) if compiles else model
    return Job(marked_step(run, optimizer, rows), partial(kept_by, model, optimizer))


def adamw_by_kind(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all contestants; its list kernels take no DTensors beside plain ones."""
    of_kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": of_kind} for of_kind in of_kinds], lr=1e-3, foreach=True)


def our_job(size: Size, rows: Rows, backend: str | None = None) -> Job:
    """Train by hetu_fx."""
    plain = llama(size)
    optimizer = adamw(plain)
    plan = hetu_fx.Plan.tensor_parallel(range(dist.get_world_size()))
    model = hetu_fx.auto_parallelize(plain, dict(rows), plan=plan, optimizer=optimizer, data="global", compile=backend)
    return Job(marked_step(model, optimizer, rows), partial(kept_by, model, optimizer))
