"""Loops of accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProfileKwargs, broadcast, find_executable_batch_size, gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL
from tests.scripts.training import batches, sgd, trained


class _Rows(Dataset[Batch]):
    def __init__(self, rows: int) -> None:
        (self.columns,) = batches(1, rows)

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def _loader(job: Job, rows: int) -> DataLoader[Batch]:
    return DataLoader(_Rows(rows), batch_size=8 // job.world)


def _train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Iterable[Batch]) -> list[float]:
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@script("prepares model, optimizer, loader and schedule by accelerate")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    # accelerate steps a schedule once per process; a constant factor in between is what scripts allow for.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // job.world))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, _loader(job, 24), schedule)
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained(model), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "rate": float(optimizer.param_groups[0]["lr"]), **job.parameters(model)}


@script("makes the model parallel after accelerate has prepared the rest")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    optimizer = sgd(model)
    optimizer, loader = accelerator.prepare(optimizer, _loader(job, 16))
    job.parallel(model, batch, optimizer=optimizer)
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("accumulates by accelerator.accumulate")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 40))
    losses = []
    for one in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(**one))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("gathers predictions for metrics, the last batch cut off where ranks were filled up")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, loader = accelerator.prepare(model, _loader(job, 20))
    model.eval()
    found = []
    for one in loader:
        with torch.no_grad():
            logits = model(x=one["x"])["logits"]
        found.append(accelerator.gather_for_metrics(logits))
    return {"logits": torch.cat(found)}


@script("works out the loss of an evaluation from gathered predictions and labels")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, loader = accelerator.prepare(model, _loader(job, 19))
    model.eval()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one in loader:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics((model(x=one["x"])["logits"], one["labels"])))
    logits, labels = (torch.cat(column) for column in zip(*found, strict=True))
    return {"loss": torch.nn.functional.cross_entropy(logits, labels), "rows": len(labels)}


@script("unwraps the prepared model, and calls it")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    prepared = accelerator.prepare(model)
    inner = accelerator.unwrap_model(prepared)
    loss = loss_of(inner(**job.rows(batch)))
    loss.backward()
    return {"same": type(inner).__name__, "loss": loss.detach(), **job.gradients(inner)}


@script("reduces and broadcasts values of the loop by accelerate")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model = accelerator.prepare(model)
    loss = loss_of(model(**job.rows(batch))).detach()
    mean = accelerator.reduce(loss, reduction="mean")
    return {"mean": mean, "first": broadcast(loss), "all": float(sum(gather_object([float(loss)])) / job.world)}


@script("skips the first batches, as after a restart")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 24))
    losses = []
    for one in skip_first_batches(loader, 1):
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("splits batches of the global size (split_batches)")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(_Rows(16), batch_size=8))
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("stops early on all ranks by a trigger")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 32))
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if len(losses) == 2 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return {"losses": losses, **job.parameters(model)}


@script("prepares in another order: loader and optimizer first, the model in a call of its own")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    loader, optimizer = accelerator.prepare(_loader(job, 24), sgd(model))
    model = accelerator.prepare(model)
    return {"losses": _train(accelerator, model, optimizer, loader), **job.parameters(model)}


@script("clips gradients by value by accelerate, and asks whether steps were skipped")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 24))
    losses = []
    for one in loader:
        loss = loss_of(model(**one))
        accelerator.backward(loss)
        accelerator.unscale_gradients()
        accelerator.clip_grad_value_(trained(model), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "skipped": accelerator.optimizer_step_was_skipped, **job.parameters(model)}


class _Count:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@script("registers an object of its own for accelerate's checkpoints, and goes back to one")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    count = _Count()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 16))
    accelerator.register_for_checkpointing(count)
    _train(accelerator, model, optimizer, loader)
    count.value = 7
    accelerator.save_state(str(job.folder / "state"))
    once = _train(accelerator, model, optimizer, loader)
    count.value = 9
    accelerator.load_state(str(job.folder / "state"))
    again = _train(accelerator, model, optimizer, loader)
    return {"count": count.value, "once": once, "again": again, **job.parameters(model)}


@script("saves by hooks of accelerate's state, which take the model's weights themselves")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 16))
    taken: dict[str, torch.Tensor] = {}

    def take(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        taken.update({name: torch.clone(tensor) for name, tensor in weights.pop().items()})

    accelerator.register_save_state_pre_hook(take)
    losses = _train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(job.folder / "state"))
    return {"losses": losses, "names": sorted(taken), "first": job.parameters(model)["parameter first.weight"]}


@script("frees memory by accelerate, and trains another model", seconds=120)
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for number in range(2):
        model, batch = job.mlp()
        job.parallel(model, batch)
        model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 16))
        found[f"losses {number}"] = _train(accelerator, model, optimizer, loader)
        found.update(job.parameters(model, f"parameter of {number} "))
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    return found


@script("profiles its steps by accelerate")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 16))
    with accelerator.profile() as profile:
        losses = _train(accelerator, model, optimizer, loader)
    seen = len(profile.key_averages()) > 0
    return {"losses": losses, "seen": seen, **job.parameters(model)}


class _Tracker(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    @property
    def tracker(self) -> list[float]:
        return self.logged

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logged.append(float(values["rate"]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append(float(values["loss"]))


@script("logs losses to a tracker of accelerate's")
def _(job: Job) -> Results:
    tracker = _Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("runs", config={"rate": 0.1})
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 24))
    for step, loss in enumerate(_train(accelerator, model, optimizer, loader)):
        accelerator.log({"loss": loss}, step=step)
    return {"logged": gather_object(tracker.logged)}


@script("has the first process read batches for all (dispatch_batches)")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 24))
    return {"losses": _train(accelerator, model, optimizer, loader), **job.parameters(model)}


@script(
    "leaves the last batch as it is, so that ranks have unequal rows (even_batches)", settings=("one", "dp2", "tp2")
)
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 22))
    return {"losses": _train(accelerator, model, optimizer, loader), **job.parameters(model)}


@script("splits what it predicts between processes by accelerate")
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model = accelerator.prepare(model).eval()
    with accelerator.split_between_processes(batch["x"][:7]) as own, torch.no_grad():
        logits = model(x=own)["logits"]
    return {"logits": job.gathered(logits)}


@script("looks for a batch size that fits by accelerate", seconds=120)
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=16 // job.world)
    def train(batch_size: int) -> dict[str, Any]:
        model, batch = job.mlp()
        job.parallel(model, batch)
        loader = DataLoader(_Rows(24), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
        if batch_size * job.world > 8:
            raise RuntimeError("CUDA out of memory.")
        return {"losses": _train(accelerator, model, optimizer, loader), **job.parameters(model)}

    found: dict[str, Any] = train()
    return found


@script(
    "averages models now and then by accelerate's LocalSGD",
    refused="LocalSGD trains one model per rank",
    settings=SEVERAL,
)
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    job.parallel(model, batch)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), _loader(job, 32))
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for one in loader:
            loss = loss_of(model(**one))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}
