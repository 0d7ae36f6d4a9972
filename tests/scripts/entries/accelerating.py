"""Loops of accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import broadcast, gather_object
from torch.utils.data import DataLoader, Dataset

from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
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
    from accelerate import DataLoaderConfiguration

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
