"""Going on from files and memory: on another plan, in other objects, by other tools, with a part of what was saved."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, TrainerCallback

from hetu_fx.plans.plan import Plan
from tests.scripts.job import Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.trainers import Rows, logged, trainer
from tests.scripts.training import batches, sgd, step, steps, trained

_SINGLE = 1e-5


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two tensors per parameter; its epsilon is large, or it divides noise by noise."""
    return torch.optim.AdamW(trained(model), lr=1e-2, eps=1e-2)


def trained_mlp(job: Job) -> tuple[Any, torch.optim.Optimizer]:
    """Return a parallel perceptron after two steps, and its optimizer."""
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = adam(model)
    steps(job, model, batches(2), optimizer)
    return model, optimizer


def other_mlp(job: Job, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return another parallel perceptron, with other values, and its optimizer."""
    torch.manual_seed(3)
    model, batch = job.mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    job.parallel(model, batch, **options)
    return model, adam(model)


def other_plan(job: Job) -> dict[str, Any]:
    """Return another plan for as many ranks."""
    return {} if job.is_plain else {"plan": Plan.data_parallel(range(job.world), range(1, job.world + 1))}


def file_of(job: Job, name: str = "saved") -> Path:
    """Return a file of this run."""
    return job.folder / name


def loaded(job: Job, name: str = "saved") -> Any:
    """Return what the first rank has saved, once it has."""
    job.barrier()
    return torch.load(file_of(job, name))


@script("goes on with another plan from what torch.save wrote")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    if job.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file_of(job))
    saved = loaded(job)
    other, resumed = other_mlp(job, **other_plan(job))
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("goes on with another plan from what model.hetu.save wrote")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    if not job.is_plain:
        model.hetu.save(job.folder / "saved", optimizer=optimizer)
    other, resumed = other_mlp(job, **other_plan(job))
    if job.is_plain:
        other.load_state_dict(kept[0])
        resumed.load_state_dict(kept[1])
    else:
        other.hetu.load(job.folder / "saved", optimizer=resumed)
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("saves all that a run has on the first rank: model, optimizer, schedule, random state")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule.step()
    if job.rank == 0:
        run = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**run, "step": 2, "random": torch.get_rng_state()}, file_of(job))
    saved = loaded(job)
    other, resumed = other_mlp(job)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    going = torch.optim.lr_scheduler.CosineAnnealingLR(resumed, 10)
    going.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["random"])
    losses = []
    for batch in batches(3):
        losses += steps(job, other, [batch], resumed)
        going.step()
    return {"losses": losses, "rate": float(resumed.param_groups[0]["lr"]), **job.parameters(other)}


@script("copies to host memory on the first rank alone, and saves that")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    if job.rank == 0:
        kept = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        torch.save(kept, file_of(job))
        torch.save({name: value.float() for name, value in model.state_dict().items()}, file_of(job, "single"))
        torch.save(copy.deepcopy(optimizer.state_dict())["state"], file_of(job, "state"))
    found = loaded(job)
    single = {f"single {name}": value for name, value in torch.load(file_of(job, "single")).items()}
    state = torch.load(file_of(job, "state"))
    kept = {f"{number} {key}": value for number, its in state.items() for key, value in its.items()}
    return {**found, **single, **kept, "losses": steps(job, model, batches(1), optimizer)}


@script("loads its state dict into a plain model on the first rank alone, and evaluates that")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    loss = 0.0
    if job.rank == 0:
        other, _ = job.mlp()
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            loss = float(loss_of(other(**batches(1)[0])))
    return {"loss": job.everyones(loss)[0], "losses": steps(job, model, batches(1), optimizer)}


@script("loads its state dict into a plain model on every rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    other, _ = job.mlp()
    other.load_state_dict(model.state_dict())
    return {**job.parameters(other), "losses": steps(job, model, batches(1), optimizer)}


@script("updates a target model by another's state dict, and softly")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    target, _ = other_mlp(job, **other_plan(job))
    target.load_state_dict(model.state_dict())
    hard = job.parameters(target, "hard ")
    steps(job, model, batches(2), optimizer)
    with torch.no_grad():
        for theirs, own in zip(target.parameters(), model.parameters(), strict=True):
            theirs.data.copy_(0.1 * own.data + 0.9 * theirs.data)
        loss = float(loss_of(target(**job.rows(batches(1)[0]))))
    return {"loss": loss, **hard, **job.parameters(target)}


@script("loads a part of a state dict, not strictly")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    other, _ = job.mlp()
    part = {name: value for name, value in other.state_dict().items() if not name.startswith("last")}
    told = model.load_state_dict({**part, "more": torch.ones(1)}, strict=False)
    losses = steps(job, model, batches(2), optimizer)
    return {"missing": list(told.missing_keys), "more": list(told.unexpected_keys), "losses": losses}


@script("loads a state dict into a submodule, and by assign=True")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    other, _ = job.mlp()
    model.first.load_state_dict(other.first.state_dict())
    model.last.load_state_dict({name: value / 2 for name, value in other.last.state_dict().items()}, assign=True)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("renames what it loads from a model that was wrapped")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    if job.rank == 0:
        torch.save(wrapped, file_of(job))
    saved = {name.removeprefix("module."): value for name, value in loaded(job).items()}
    other, resumed = other_mlp(job)
    other.load_state_dict(saved)
    return {"losses": steps(job, other, batches(2), resumed), **job.parameters(other)}


@script("loads from a file that is mapped into memory")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    if job.rank == 0:
        torch.save(model.state_dict(), file_of(job))
    job.barrier()
    other, resumed = other_mlp(job)
    other.load_state_dict(torch.load(file_of(job), mmap=True))
    return {"losses": steps(job, other, batches(2), resumed), **job.parameters(other)}


@script("averages the checkpoints of several steps")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    for number in range(3):
        if job.rank == 0:
            torch.save(model.state_dict(), file_of(job, str(number)))
        steps(job, model, batches(1), optimizer)
    job.barrier()
    files = [torch.load(file_of(job, str(number))) for number in range(3)]
    model.load_state_dict({name: sum(one[name] for one in files) / 3 for name in files[0]})
    return {"losses": steps(job, model, batches(1), optimizer), **job.parameters(model)}


@script("saves only what is trained, on the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    if job.rank == 0:
        torch.save({name: p for name, p in model.named_parameters() if p.requires_grad}, file_of(job))
    steps(job, model, batches(1), optimizer)
    found = loaded(job)
    kinds = sorted({type(value).__name__ for value in found.values()})
    return {"kinds": kinds, **{name: value.detach() for name, value in found.items()}}


@script("saves batch statistics with the parameters, and goes on from them")
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    for _ in range(2):
        step(job, model, batch, sgd(model))
    if job.rank == job.world - 1:
        torch.save(model.state_dict(), file_of(job))
    saved = loaded(job)
    losses = [step(job, model, batch, sgd(model))]
    model.load_state_dict(saved)
    losses.append(step(job, model, batch, sgd(model)))
    with torch.no_grad():
        evaluated = float(loss_of(model.eval()(**job.rows(batch))))
    return {"losses": losses, "evaluated": evaluated, **saved, **job.buffers(model)}


@script("keeps a shadow of parameters in single precision, and loads it")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    shadow = {name: value.detach().float().cpu().clone() for name, value in model.state_dict().items()}
    for batch in batches(3):
        steps(job, model, [batch], optimizer)
        for name, value in model.state_dict().items():
            shadow[name].lerp_(value.detach().float().cpu(), 0.25)
    model.load_state_dict(shadow)
    with torch.no_grad():
        loss = float(loss_of(model(**job.rows(batches(1)[0]))))
    return {"loss": loss, **job.parameters(model)}


@script("keeps an average of the model with its buffers, and saves it on the first rank", tolerance=1e-6)
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    for _ in range(2):
        step(job, model, batch, sgd(model))
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(now, alpha=0.1)
            for kept, now in zip(average.buffers(), model.buffers(), strict=True):
                kept.copy_(now)
    if job.rank == 0:
        torch.save(average.state_dict(), file_of(job))
    with torch.no_grad():
        loss = float(loss_of(average(**job.rows(batch))))
    return {"loss": loss, **loaded(job)}


@script("tells by a hash that ranks have the same parameters")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        digest.update(value.round(decimals=6).numpy().tobytes())
    return {"same": len(set(job.everyones(digest.hexdigest())))}


@script("compares state dicts before and after")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    before = copy.deepcopy(model.state_dict())
    steps(job, model, batches(1), optimizer)
    now = model.state_dict()
    same = [f"{name} {torch.equal(before[name], now[name])} {torch.allclose(before[name], now[name])}" for name in now]
    apart = [float((before[name] - value).abs().max()) for name, value in now.items()]
    return {"same": same, "apart": apart}


@script("pickles model and optimizer together, and trains them")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    other, resumed = torch.load(buffer, weights_only=False)
    for one in batches(2):
        loss_of(other(**one)).backward()
        resumed.step()
        resumed.zero_grad()
    again = pickle.loads(pickle.dumps(optimizer.state_dict()))
    kept = {f"{n} {key}": torch.as_tensor(v) for n, its in again["state"].items() for key, v in its.items()}
    return {**job.parameters(other), **kept}


@script("takes a copy to another precision, and saves that", tolerance=1e-6)
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    single = copy.deepcopy(model).float()
    if job.rank == 0:
        torch.save(single.state_dict(), file_of(job))
    found = loaded(job)
    return {**found, "losses": steps(job, model, batches(1), optimizer)}


class AppState(dcp.stateful.Stateful):
    """What the tutorial of torch.distributed.checkpoint saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of both."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both."""
        dcp_state.set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )


@script("saves a stateful object by torch.distributed.checkpoint, and goes on with another plan")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    other, resumed = other_mlp(job, **other_plan(job))
    dcp.load({"app": AppState(other, resumed)}, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    return {"losses": steps(job, other, batches(3), resumed), **job.parameters(other)}


@script("turns what torch.distributed.checkpoint wrote into one file")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    dcp.save(model.state_dict(), checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    job.barrier()
    if job.rank == 0:
        dcp_to_torch_save(job.folder / "dcp", file_of(job))
    found: dict[str, Tensor] = loaded(job)
    return dict(found)


@script("loads full state dicts by torch.distributed.checkpoint, from the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    full = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = dcp_state.get_model_state_dict(model, options=full)
    if job.rank == 0:
        torch.save(found, file_of(job))
        found = torch.load(file_of(job))
    steps(job, model, batches(2), optimizer)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=job.world > 1)
    dcp_state.set_model_state_dict(model, found if job.rank == 0 else {}, options=options)
    return {"losses": steps(job, model, batches(1), optimizer), **job.parameters(model)}


@script("names checkpoints by accelerate, keeps two, and loads the last")
def _(job: Job) -> Results:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(project_dir=str(job.folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=settings)
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(schedule)
    for _ in range(3):
        steps(job, model, batches(1), optimizer)
        schedule.step()
        accelerator.save_state()
        accelerator.wait_for_everyone()
    steps(job, model, batches(2), optimizer)
    accelerator.load_state()
    kept = sorted(path.name for path in (job.folder / "checkpoints").iterdir())
    return {"kept": kept, "losses": steps(job, model, batches(1), optimizer), "rate": float(schedule.get_last_lr()[0])}


@script("unwraps and saves by save_pretrained with accelerate's state dict", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, batch = job.llama(tie_word_embeddings=True)
    job.parallel(model, batch)
    model, optimizer = accelerator.prepare(model, sgd(model))
    step(job, model, batch, optimizer)
    accelerator.unwrap_model(model).save_pretrained(
        job.folder / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    found = AutoModelForCausalLM.from_pretrained(job.folder / "model", dtype=torch.float64)
    return {**job.parameters(found), "loss": step(job, model, batch, optimizer)}


@script("saves only models by Trainer, and loads one into the parallel model", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_only_model": True}
    made = trainer(job, model, {**options, "output_dir": str(job.folder)})
    made.train()
    made.accelerator.wait_for_everyone()
    files = sorted(path.name for path in (job.folder / "checkpoint-2").iterdir())
    found = AutoModelForCausalLM.from_pretrained(job.folder / "checkpoint-2", dtype=torch.float64)
    model.load_state_dict(found.state_dict())
    return {"files": files, "loss": step(job, model, batch, sgd(model)), **job.parameters(model)}


@script("resumes by Trainer from the last checkpoint of the plain script", tolerance=_SINGLE)
def _(job: Job) -> Results:
    options = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(job.folder / f"run{job.rank}")}
    options |= {"optim": "adamw_torch", "adam_epsilon": 1e-2, "learning_rate": 1e-2}
    model, batch = job.llama()
    job.parallel(model, batch)
    made = trainer(job, model, {**options, "output_dir": str(job.folder), "max_steps": 2})
    made.train()
    torch.manual_seed(5)
    other, _ = job.llama()
    job.parallel(other, batch, **other_plan(job))
    resumed = trainer(job, other, {**options, "output_dir": str(job.folder), "max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    return {**logged(resumed, "loss"), "step": resumed.state.global_step, **job.parameters(other)}


@script("saves by a callback of Trainer on the first rank", tolerance=_SINGLE)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and state.global_step == 2:
                model.save_pretrained(job.folder / "second")

    made = trainer(job, model, {"max_steps": 3}, callbacks=[Save()])
    made.train()
    made.save_model(str(job.folder / "last"))
    made.save_state()
    job.barrier()
    found = [AutoModelForCausalLM.from_pretrained(job.folder / one, dtype=torch.float64) for one in ("second", "last")]
    return {**job.parameters(found[0], "second "), **job.parameters(found[1], "last ")}


@script("stops early by Trainer and takes the best model", tolerance=_SINGLE)
def _(job: Job) -> Results:
    from transformers import EarlyStoppingCallback

    model, batch = job.llama()
    job.parallel(model, batch)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "learning_rate": 4.0, "max_steps": 6}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "output_dir": str(job.folder)}
    stop = EarlyStoppingCallback(early_stopping_patience=1)
    made = trainer(job, model, options, eval_dataset=Rows(16), callbacks=[stop])
    made.train()
    return {**logged(made, "eval_loss"), "steps": made.state.global_step, **job.parameters(model)}


@script("initializes one half from a file on the first rank before the call")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    if job.rank == 0:
        with torch.no_grad():
            model.last.weight.fill_(0.125)
    job.parallel(model, batch)
    return {"losses": steps(job, model, batches(2), sgd(model)), "weight": whole(model.last.weight)}


@script("saves by torch.distributed.checkpoint while it trains on")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    under_way = dcp.async_save(model.state_dict(), checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    losses = steps(job, model, batches(2), optimizer)
    under_way.result()  # type: ignore[union-attr]
    job.barrier()
    other, resumed = other_mlp(job)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=job.folder / "dcp", no_dist=job.world == 1)
    other.load_state_dict(state)
    return {"losses": losses, **job.parameters(other), "going on": steps(job, other, batches(1), resumed)}


@script("writes to a file in a thread what it has copied on every rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    kept = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    writer = threading.Thread(target=torch.save, args=(kept, file_of(job)), daemon=True)
    if job.rank == 0:
        writer.start()
    losses = steps(job, model, batches(3), optimizer)
    if job.rank == 0:
        writer.join()
    return {"losses": losses, **loaded(job)}


@script("rolls back to a copy after a bad step, and lowers the rate")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    losses = []
    for number, batch in enumerate(batches(4)):
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        losses += steps(job, model, [batch], optimizer)
        if number == 1:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
    return {"losses": losses, **job.parameters(model)}


@script("loads its optimizer's state into one with other rates")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    if job.rank == 0:
        torch.save(optimizer.state_dict(), file_of(job))
    saved = loaded(job)
    other = torch.optim.AdamW(trained(model), lr=1.0, eps=1e-2)
    other.load_state_dict(saved)
    other.param_groups[0]["lr"] = 5e-3
    rates = [float(saved["param_groups"][0]["lr"])]
    return {"losses": steps(job, model, batches(2), other), "rates": rates, **job.parameters(model)}


@script("looks into what it has saved by numpy.savez, and loads that")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    if job.rank == 0:
        np.savez(file_of(job, "saved.npz"), **{name: value.numpy() for name, value in model.state_dict().items()})
    job.barrier()
    other, resumed = other_mlp(job)
    with np.load(file_of(job, "saved.npz")) as found, torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.from_numpy(found[name]))
    return {"losses": steps(job, other, batches(2), resumed), **job.parameters(other)}
