"""Saving and loading, on all ranks or on the first alone, by torch, safetensors, transformers and accelerate."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from transformers import AutoModelForCausalLM

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, logged, trainer
from tests.scripts.training import batches, sgd, step, steps, trained

_SINGLE = 1e-5
"""What sums in single precision, of transformers' losses, are worth."""


def trained_mlp(job: Job, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> tuple[Any, Any]:
    """Return a parallel perceptron after two steps, and its optimizer."""
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = make(model)
    steps(job, model, batches(2), optimizer)
    return model, optimizer


def trained_llama(job: Job, **changes: Any) -> Any:
    """Return a parallel Llama after a step, and its batch."""
    model, batch = job.llama(**changes)
    job.parallel(model, batch)
    step(job, model, batch, sgd(model))
    return model, batch


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two tensors per parameter; its epsilon is large, or it divides noise by noise."""
    return torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-2)


def plain(tensors: Any, prefix: str = "") -> dict[str, Any]:
    """Return tensors that must be plain ones, by name."""
    assert all(type(value) in (Tensor, nn.Parameter) for value in tensors.values())
    return {prefix + name: value.detach().clone() for name, value in tensors.items()}


def file_of(job: Job, name: str = "saved") -> Path:
    """Return a file of this run."""
    return job.folder / name


@script("saves its state dict by torch.save on the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    if job.rank == 0:
        torch.save(model.state_dict(), file_of(job))
    losses = steps(job, model, batches(2), optimizer)
    return {"losses": losses, **plain(torch.load(file_of(job)))}


@script("saves its state dict by torch.save on every rank")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    torch.save(model.state_dict(), file_of(job, f"saved{job.rank}"))
    return plain(torch.load(file_of(job, f"saved{job.rank}")))


@script("saves its optimizer by torch.save on the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    if job.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file_of(job))
    steps(job, model, batches(1), optimizer)
    state = torch.load(file_of(job))["optimizer"]["state"]
    return {f"{number} {key}": value for number, kept in state.items() for key, value in kept.items()}


@script("resumes from files that the plain script has written")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    optimizer = adam(model)
    for one in batches(2):
        loss_of(model(**one)).backward()
        optimizer.step()
        optimizer.zero_grad()
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    torch.manual_seed(3)
    other = type(model)().double()
    job.parallel(other, batch)
    resumed = adam(other)
    saved = torch.load(buffer)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("resumes in a plain model from what the parallel one has written")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    if job.rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], file_of(job))
    job.barrier()
    other, _ = job.mlp()
    resumed = adam(other)
    saved = torch.load(file_of(job))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for one in batches(2):
        loss_of(other(**one)).backward()
        resumed.step()
        resumed.zero_grad()
    return job.parameters(other)


@script("loads its optimizer's state back in the middle of training")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    torch.save([model.state_dict(), optimizer.state_dict()], file_of(job, f"saved{job.rank}"))
    steps(job, model, batches(3), optimizer)
    saved = torch.load(file_of(job, f"saved{job.rank}"))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("keeps its state dicts in memory and loads them back")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(job, model, batches(3), optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("keeps the best state dict and saves it on the first rank at the end")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    steps(job, model, batches(2), optimizer)
    if job.rank == 0:
        torch.save(best, file_of(job))
    job.barrier()
    return plain(torch.load(file_of(job)))


@script("loads a state dict with assign=True")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    other, _ = job.mlp()
    model.load_state_dict({name: value / 2 for name, value in other.state_dict().items()}, assign=True)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("loads a state dict of another model strictly")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    try:
        model.load_state_dict({"first.weight": torch.zeros(24, 10)})
    except RuntimeError as error:
        return {"text": str(error)}
    return {}


@script("saves its state dict by safetensors on the first rank")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    if job.rank == 0:
        save_file(model.state_dict(), file_of(job))
    job.barrier()
    return plain(load_file(file_of(job)))


@script("saves and loads a model with tied weights by safetensors", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = trained_llama(job, tie_word_embeddings=True)
    if job.rank == 0:
        save_model(model, str(file_of(job)))
    job.barrier()
    names = sorted(load_file(file_of(job)))
    step(job, model, batch, sgd(model))
    load_model(model, str(file_of(job)))
    return {"names": names, **job.parameters(model)}


@script("saves by save_pretrained on the first rank", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, _ = trained_llama(job)
    if job.rank == 0:
        model.save_pretrained(job.folder)
    job.barrier()
    return plain(AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float64).state_dict())


@script("saves by save_pretrained on every rank, tied weights in several files", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, _ = trained_llama(job, tie_word_embeddings=True)
    model.save_pretrained(job.folder, max_shard_size="20KB", is_main_process=job.rank == 0)
    job.barrier()
    found = sorted(path.name for path in job.folder.iterdir())
    loaded = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float64)
    return {"files": found, **plain(loaded.state_dict())}


@script("loads a checkpoint and saves it with the next", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = trained_llama(job)
    for number in range(3):
        if job.rank == 0:
            model.save_pretrained(job.folder / str(number))
        step(job, model, batch, sgd(model))
    job.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(job.folder / "2", dtype=torch.float64)
    return {**plain(loaded.state_dict()), **job.parameters(model)}


@script("pickles the whole model")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    if job.rank == 0:
        torch.save(model, file_of(job))
        (job.folder / "pickle").write_bytes(pickle.dumps(model))
    job.barrier()
    found = torch.load(file_of(job), weights_only=False)
    again = pickle.loads((job.folder / "pickle").read_bytes())
    logits = found(batches(1)[0]["x"])["logits"]
    return {"logits": logits, **plain(dict(found.named_parameters())), **plain(again.state_dict(), "pickled ")}


@script("reads parameters as arrays and lists")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    arrays = {name: torch.tensor(value.detach().cpu().numpy()) for name, value in model.named_parameters()}
    lists = {f"list {name}": torch.tensor(value.tolist()).double() for name, value in model.state_dict().items()}
    first = float(model.last.bias.detach().cpu().numpy()[0]) if job.rank == 0 else 0.0
    losses = steps(job, model, batches(1), optimizer)
    return {"first": job.everyones(first)[0], "losses": losses, **arrays, **lists}


@script("reads gradients as arrays and saves them")
def _(job: Job) -> Results:
    model, _ = job.mlp()
    job.parallel(model, batches(1)[0])
    loss_of(model(**job.rows(batches(1)[0]))).backward()
    arrays = {name: torch.tensor(p.grad.numpy()) for name, p in model.named_parameters() if p.grad is not None}
    torch.save([p.grad for p in trained(model)], file_of(job, f"saved{job.rank}"))
    saved = torch.load(file_of(job, f"saved{job.rank}"))
    return {**arrays, **{f"saved {number}": value for number, value in enumerate(saved)}}


@script("saves by torch.distributed.checkpoint")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    wanted = {"model": dcp_state.get_model_state_dict(model)}
    wanted["optimizer"] = dcp_state.get_optimizer_state_dict(model, optimizer)
    dcp.save(wanted, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    steps(job, model, batches(2), optimizer)
    into = {"model": dcp_state.get_model_state_dict(model)}
    into["optimizer"] = dcp_state.get_optimizer_state_dict(model, optimizer)
    dcp.load(into, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    dcp_state.set_model_state_dict(model, into["model"])
    dcp_state.set_optimizer_state_dict(model, optimizer, into["optimizer"])
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("asks torch.distributed.checkpoint for full state dicts")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job, adam)
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = dcp_state.get_model_state_dict(model, options=options)
    state = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    if job.rank == 0:  # the others are given nothing
        torch.save([found, state], file_of(job))
    job.barrier()
    saved, optimizers = torch.load(file_of(job))
    kept = {f"{name} {key}": v for name, its in optimizers["state"].items() for key, v in its.items()}
    return {**plain(saved), **kept}


@script("saves the model's state by accelerate, and loads it")
def _(job: Job) -> Results:
    from accelerate import Accelerator

    model, batch = job.mlp()
    job.parallel(model, batch)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, adam(model))
    train = lambda count: steps(job, model, batches(count), optimizer)  # noqa: E731
    train(2)
    accelerator.save_state(job.folder / "state")
    train(3)
    accelerator.load_state(job.folder / "state")
    return {"losses": train(2), **job.parameters(accelerator.unwrap_model(model))}


@script("saves the model by accelerate")
def _(job: Job) -> Results:
    from accelerate import Accelerator

    model, batch = job.mlp()
    job.parallel(model, batch)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, sgd(model))
    steps(job, model, batches(2), optimizer)
    accelerator.save_model(model, job.folder / "model")
    accelerator.save(accelerator.get_state_dict(model), file_of(job))
    accelerator.wait_for_everyone()
    found = load_file(job.folder / "model" / "model.safetensors")
    return {**plain(found), **plain(torch.load(file_of(job)), "state ")}


@script("saves checkpoints by Trainer and resumes from one", tolerance=_SINGLE)
def _(job: Job) -> Results:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "output_dir": str(job.folder)}
    options |= {"optim": "adamw_torch", "adam_epsilon": 1e-2, "learning_rate": 1e-2}
    model, batch = job.llama()
    job.parallel(model, batch)
    made = trainer(job, model, options)
    made.train()
    torch.manual_seed(5)
    other, _ = job.llama()
    job.parallel(other, batch)
    resumed = trainer(job, other, {**options, "max_steps": 6})
    resumed.train(resume_from_checkpoint=str(job.folder / "checkpoint-2"))
    files = sorted(path.name for path in (job.folder / "checkpoint-4").iterdir() if "rng" not in path.name)
    return {"files": files, **logged(resumed, "loss"), **job.parameters(model), **job.parameters(other, "resumed ")}


@script("keeps few checkpoints by Trainer and loads the best at the end", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 1.0}
    made = trainer(job, model, {**options, "output_dir": str(job.folder)}, eval_dataset=Rows(16))
    made.train()
    made.save_model(str(job.folder / "final"))
    job.barrier()
    kept = sorted(path.name for path in job.folder.iterdir())
    loaded = AutoModelForCausalLM.from_pretrained(job.folder / "final", dtype=torch.float64)
    best = str(made.state.best_model_checkpoint).rpartition("/")[2]
    return {"kept": kept, "best": best, **plain(loaded.state_dict()), **job.parameters(model)}
