"""torch.distributed.checkpoint: ranks write their parts; one device, other plans and torch's own tools read them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from hetu_fx import PartsStager
from tests.scripts.entries.resuming import adam, other_mlp, other_plan, trained_mlp
from tests.scripts.job import Job, whole
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, step, steps

_SINGLE = 1e-5


def states(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    """Return both state dicts, by the parameters' names."""
    given = dcp_state.StateDictOptions(**options)
    found, kept = dcp_state.get_state_dict(model, optimizer, options=given)
    return {"model": found, "optimizer": kept}


def written(job: Job, found: dict[str, Any], **options: Any) -> Path:
    """Have all ranks write what they hold; return where, once it is there."""
    dcp.save(found, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1, **options)
    job.barrier()
    return job.folder / "dcp"


def read(job: Job, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Have all ranks read what they hold."""
    into = states(model, optimizer, **options)
    dcp.load(into, checkpoint_id=folder, no_dist=job.world == 1)
    _give(model, optimizer, into, **options)


def _give(model: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, Any], **options: Any) -> None:
    dcp_state.set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=dcp_state.StateDictOptions(**options),
    )


def plain_mlp(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a perceptron of one device with other values, and its optimizer."""
    model, _ = job.mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model, adam(model)


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> list[float]:
    """Train on one device on whole batches; return the losses."""
    return steps(Job(None, 0, 1, Path()), model, batches(count), optimizer)


def on_file(found: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors of nested dicts, by their paths."""
    flat: dict[str, Tensor] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= on_file(value, f"{prefix}{name} ")
        elif isinstance(value, Tensor):
            flat[prefix + str(name)] = whole(value)
    return flat


def gone_on(job: Job, folder: Path) -> Results:
    """Return what another model becomes that goes on from a folder."""
    other, resumed = other_mlp(job)
    read(job, folder, other, resumed)
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("writes by torch.distributed.checkpoint what a plain model goes on from")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    folder = written(job, states(model, optimizer))
    other, resumed = plain_mlp(job)
    into = states(other, resumed)
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    _give(other, resumed, into)
    return {"losses": alone(other, resumed), **job.parameters(other)}


@script("goes on from what a plain model has written by torch.distributed.checkpoint")
def _(job: Job) -> Results:
    model, optimizer = plain_mlp(job)
    alone(model, optimizer)
    if job.rank == 0:
        dcp.save(states(model, optimizer), checkpoint_id=job.folder / "dcp", no_dist=True)
    job.barrier()
    return gone_on(job, job.folder / "dcp")


@script("goes on with another plan from what each rank has written of model and optimizer")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    folder = written(job, states(model, optimizer))
    straight = steps(job, model, batches(3), optimizer)
    other, resumed = other_mlp(job, **other_plan(job))
    read(job, folder, other, resumed)
    return {"straight": straight, "losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("flattens the optimizer's state for torch.distributed.checkpoint")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    flat = {"flatten_optimizer_state_dict": True}
    folder = written(job, states(model, optimizer, **flat))
    other, resumed = other_mlp(job, **other_plan(job))
    read(job, folder, other, resumed, **flat)
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("turns model and optimizer that torch.distributed.checkpoint wrote into one file")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    folder = written(job, states(model, optimizer))
    if job.rank == 0:
        dcp_to_torch_save(folder, job.folder / "saved")
    job.barrier()
    found = torch.load(job.folder / "saved")
    other, resumed = plain_mlp(job)
    _give(other, resumed, found)
    return {**on_file(found), "losses": alone(other, resumed)}


@script("turns a file of torch.save into what torch.distributed.checkpoint reads, and goes on from that")
def _(job: Job) -> Results:
    model, optimizer = plain_mlp(job)
    alone(model, optimizer)
    if job.rank == 0:
        torch.save(states(model, optimizer), job.folder / "saved")
        torch_save_to_dcp(job.folder / "saved", job.folder / "dcp")
    job.barrier()
    return gone_on(job, job.folder / "dcp")


@script("reads whole state dicts on the first rank, which sends them to the others (broadcast_from_rank0)")
def _(job: Job) -> Results:
    model, optimizer = plain_mlp(job)
    alone(model, optimizer)
    found = states(model, optimizer, full_state_dict=True)
    other, resumed = other_mlp(job)
    # Not by set_state_dict: that one takes an empty dict for nothing to load, and rank 0 would wait for the others.
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=job.world > 1)
    given = found if job.rank == 0 else {"model": {}, "optimizer": {}}
    dcp_state.set_model_state_dict(other, given["model"], options=options)
    dcp_state.set_optimizer_state_dict(other, resumed, given["optimizer"], options=options)
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("gives whole state dicts to all ranks, which keep their parts (full_state_dict)")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    found = copy.deepcopy(states(model, optimizer, full_state_dict=True))  # references, as torch's own are
    steps(job, model, batches(2), optimizer)
    _give(model, optimizer, found, full_state_dict=True)
    return {**on_file(found), "losses": steps(job, model, batches(2), optimizer)}


@script("writes model and optimizer by torch.distributed.checkpoint while it trains on")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    apart = dist.new_group(backend="gloo") if job.world > 1 else None
    under_way: Any = dcp.async_save(
        states(model, optimizer), checkpoint_id=job.folder / "dcp", process_group=apart, no_dist=job.world == 1
    )
    losses = steps(job, model, batches(2), optimizer)
    under_way.result()
    job.barrier()
    other, resumed = other_mlp(job, **other_plan(job))
    read(job, job.folder / "dcp", other, resumed)
    return {"losses": losses, "again": steps(job, other, batches(2), resumed), **job.parameters(other)}


@script("leaves what is frozen out of what torch.distributed.checkpoint writes")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    options = {"ignore_frozen_params": True}
    found = states(model, optimizer, **options)
    folder = written(job, found)
    steps(job, model, batches(2), optimizer)
    read(job, folder, model, optimizer, strict=False, **options)
    return {"names": sorted(found["model"]), "losses": steps(job, model, batches(2), optimizer)}


@script("writes tied weights by torch.distributed.checkpoint, and a plain model reads them", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama(tie_word_embeddings=True)
    job.parallel(model, batch)
    optimizer = sgd(model)
    step(job, model, batch, optimizer)
    folder = written(job, states(model, optimizer))
    other, _ = job.llama(tie_word_embeddings=True)
    resumed = sgd(other)
    into = states(other, resumed)
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    _give(other, resumed, into)
    loss = step(Job(None, 0, 1, Path()), other, batch, resumed)
    return {"loss": loss, **job.parameters(other)}


@script("writes batch statistics by torch.distributed.checkpoint, and goes on with another plan")
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for _ in range(2):
        step(job, model, batch, optimizer)
    folder = written(job, states(model, optimizer))
    other, _ = job.conv()
    job.parallel(other, batch, **other_plan(job))
    resumed = sgd(other)
    read(job, folder, other, resumed)
    return {"loss": step(job, other, batch, resumed), **job.parameters(other), **job.buffers(other)}


@script("reads one parameter of what torch.distributed.checkpoint wrote into a plain tensor")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    folder = written(job, states(model, optimizer))
    weight = torch.zeros_like(job.mlp()[0].get_parameter("middle.weight"))
    dcp.load({"model": {"middle.weight": weight}}, checkpoint_id=folder, no_dist=True)
    return {"weight": weight.detach()}


@script("writes optimizer.state_dict() itself by torch.distributed.checkpoint, with a schedule and a step")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule.step()
    kept: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    folder = written(job, kept | {"schedule": schedule})
    steps(job, model, batches(2), optimizer)
    schedule.step()
    into: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(into | {"schedule": schedule}, checkpoint_id=folder, no_dist=job.world == 1)
    optimizer.load_state_dict(into["optimizer"])
    losses = steps(job, model, batches(2), optimizer)
    return {"losses": losses, "rate": float(schedule.get_last_lr()[0]), **job.parameters(model)}


@script("writes a part of the model by torch.distributed.checkpoint, over threads and in few files")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    part = {name: value for name, value in model.state_dict().items() if not name.startswith("first")}
    writer = dcp.FileSystemWriter(job.folder / "dcp", single_file_per_rank=False, thread_count=2)
    dcp.save({"model": part}, storage_writer=writer, no_dist=job.world == 1)
    job.barrier()
    other, resumed = other_mlp(job, **other_plan(job))
    into = {"model": dict(other.state_dict())}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, checkpoint_id=job.folder / "dcp", planner=planner, no_dist=job.world == 1)
    other.load_state_dict(into["model"])
    return {"losses": steps(job, other, batches(2), resumed), **job.parameters(other)}


@script("writes parts that are copied to host memory first (cpu_offload)")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    folder = written(job, states(model, optimizer, cpu_offload=True))
    other, resumed = other_mlp(job, **other_plan(job))
    read(job, folder, other, resumed, cpu_offload=True)
    return {"losses": steps(job, other, batches(2), resumed), **job.parameters(other)}


@script("copies each rank's parts, and has threads write them while it trains on")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    apart = dist.new_group(backend="gloo") if job.world > 1 else None
    under_way: Any = dcp.async_save(
        states(model, optimizer),
        checkpoint_id=job.folder / "dcp",
        process_group=apart,
        async_stager=PartsStager(),
        no_dist=job.world == 1,
    )
    losses = steps(job, model, batches(2), optimizer)
    under_way.result()
    job.barrier()
    other, resumed = other_mlp(job, **other_plan(job))
    read(job, job.folder / "dcp", other, resumed)
    return {"losses": losses, "again": steps(job, other, batches(2), resumed), **job.parameters(other)}
