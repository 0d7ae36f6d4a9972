"""Training loops as people write them."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import batches, in_double, sgd, step, steps, trained


@script("makes the model parallel before the optimizer")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = steps(job, model, batches(3), sgd(model))
    return {"losses": losses, **job.parameters(model)}


@script("makes the model parallel after the optimizer")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    optimizer = sgd(model)
    job.parallel(model, batch)
    losses = steps(job, model, batches(3), optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("makes the model parallel in the middle of training")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    optimizer = sgd(model)
    for one in batches(2):
        loss_of(model(**one)).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.parallel(model, batch, optimizer=optimizer)
    losses = steps(job, model, batches(3), optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("keeps gradients made before the model was parallel")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    loss_of(model(**batch)).backward()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


@script("clips gradients by their norm")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    norms: list[float] = []
    losses = steps(
        job, model, batches(3), sgd(model), lambda: norms.append(float(clip_grad_norm_(trained(model), 0.1)))
    )
    return {"losses": losses, "norms": norms, **job.parameters(model)}


@script("clips gradients by the largest value (norm of order infinity)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    norms: list[float] = []

    def clip() -> None:
        norms.append(float(clip_grad_norm_(trained(model), 0.05, norm_type=float("inf"))))

    losses = steps(job, model, batches(2), sgd(model), clip)
    return {"losses": losses, "norms": norms, **job.parameters(model)}


@script("clips gradients by value")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = steps(job, model, batches(2), sgd(model), lambda: clip_grad_value_(trained(model), 0.01))
    return {"losses": losses, **job.parameters(model)}


@script("scales each gradient by hand")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)

    def halve() -> None:
        for parameter in trained(model):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    losses = steps(job, model, batches(2), sgd(model), halve)
    return {"losses": losses, **job.parameters(model)}


@script("adds weight decay to the gradients by hand")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)

    def decay() -> None:
        for parameter in trained(model):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.data, alpha=0.01)

    losses = steps(job, model, batches(2), sgd(model), decay)
    return {"losses": losses, **job.parameters(model)}


@script("updates parameters by hand under no_grad")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
        with torch.no_grad():
            for parameter in trained(model):
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    return job.parameters(model)


@script("adds a penalty of the weights to the loss")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        loss = loss_of(model(**job.rows(one))) + 0.01 * sum((p**2).sum() for p in trained(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.parameters(model)


@script("accumulates gradients over micro-batches of equal size")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = []
    for index, one in enumerate(batches(4)):
        loss = loss_of(model(**job.rows(one))) / 2
        loss.backward()
        losses.append(float(loss.detach()))
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, **job.parameters(model)}


@script("accumulates within no_sync, as scripts of DistributedDataParallel do")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    first, second = batches(2)
    if job.is_plain:
        (loss_of(model(**first)) / 2).backward()
    else:
        with model.no_sync():
            (loss_of(model(**job.rows(first))) / 2).backward()
    (loss_of(model(**job.rows(second))) / 2).backward()
    optimizer.step()
    return job.parameters(model)


@script("evaluates between steps, with no_grad")
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = []
    for _ in range(2):
        model.train()
        step(job, model, batch, optimizer)
        model.eval()
        with torch.no_grad():
            losses.append(float(loss_of(model(**job.rows(batch)))))
    return {"losses": losses, **job.parameters(model), **job.buffers(model)}


@script("evaluates in inference mode, and gathers logits")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    model.eval()
    with torch.inference_mode():
        output = model(**job.rows(batch))
    return {"loss": output["loss"].clone(), "logits": job.gathered(output["logits"].clone())}


@script("predicts without labels")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    model.eval()
    with torch.no_grad():
        output = model(job.rows(batch)["x"])
    return {"logits": job.gathered(output["logits"])}


@script("asks for the outputs in training")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch, outputs="all")
    output = model(**job.rows(batch))
    output["loss"].backward()
    return {"logits": job.gathered(output["logits"]), **job.gradients(model)}


@script("makes the loss of the logits in the loop")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, {"x": batch["x"]})
    mine = job.rows(batch)
    loss = functional.cross_entropy(model(mine["x"])["logits"], mine["labels"])
    loss.backward()
    return job.gradients(model)


@script("gives a loss_fn")
def _(job: Job) -> Results:
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    (batch,) = batches(1)
    example = (batch["x"], batch["labels"])

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, labels)

    wrapped = _WithLoss(model, loss_fn)
    job.parallel(wrapped, example)
    loss = wrapped(*(job.cut(part) for part in example))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(wrapped)}


class _WithLoss(nn.Module):
    """A model and a loss, as many scripts put them together; returns a bare tensor."""

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model(x), labels)  # type: ignore[operator, no-any-return]


@script("has a last batch of fewer rows")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = steps(job, model, [*batches(1), *batches(1, rows=4)], sgd(model))
    return {"losses": losses, **job.parameters(model)}


@script("brings unequal numbers of rows")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    ends = [0, *(8 - job.world + 1 + rank for rank in range(job.world))]  # all that is left over comes from rank 0
    own = slice(ends[job.rank], ends[job.rank + 1])
    loss = loss_of(model(**{name: tensor[own] for name, tensor in batch.items()}))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("has a rank without rows")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    own = slice(0, 8) if job.rank == 0 else slice(8, 8)
    loss = loss_of(model(**{name: tensor[own] for name, tensor in batch.items()}))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("reads a DataLoader with a DistributedSampler")
def _(job: Job) -> Results:
    from torch.utils.data import DistributedSampler

    model, batch = job.mlp()
    job.parallel(model, batch)
    data = in_double({"x": torch.cat([one["x"] for one in batches(2)])})["x"]
    labels = torch.cat([one["labels"] for one in batches(2)])
    dataset = TensorDataset(data, labels)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, job.world, job.rank, shuffle=False)
    losses, optimizer = [], sgd(model)
    for x, y in DataLoader(dataset, batch_size=8 // job.world, sampler=sampler):
        loss = loss_of(model(x=x, labels=y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    # A sampler deals rows out one by one, so a global batch has the same rows in another order.
    return {"losses": losses, **job.parameters(model)}


@script("passes the same whole batch on every rank (data='global')")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch, data="global")
    loss = loss_of(model(**batch))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("calls the model by position")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, (batch["x"], batch["labels"]))
    mine = job.rows(batch)
    loss = loss_of(model(mine["x"], mine["labels"]))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("calls forward itself instead of the model")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model.forward(**job.rows(batch)))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("sets gradients to zero in place")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {**job.parameters(model), **job.gradients(model)}


@script("forgets gradients by model.zero_grad")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        model.zero_grad()
        loss_of(model(**job.rows(one))).backward()
        optimizer.step()
    return job.parameters(model)


@script("skips a step whose loss is too large")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    skipped = 0
    for index, one in enumerate(batches(3)):
        loss = loss_of(model(**job.rows(one)))
        loss.backward()
        if index == 1:
            skipped += 1
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {"skipped": skipped, **job.parameters(model)}


@script("does not call backward on some batches")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for index, one in enumerate(batches(4)):
        loss = loss_of(model(**job.rows(one)))
        if index % 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.parameters(model)


@script("keeps losses that have graphs, and adds them up")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second = batches(2)
    total = loss_of(model(**job.rows(first))) + 2 * loss_of(model(**job.rows(second)))
    total.backward()
    return {"total": total.detach(), **job.gradients(model)}


@script("trains a part of the model, and then all of it, from the start on")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    job.parallel(model, batch)
    losses = steps(job, model, batches(2), sgd(model))
    return {"losses": losses, **job.parameters(model)}


@script("has parameters that the loss does not need")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.unused = nn.Linear(3, 3).double()
    with torch.no_grad():
        model.unused.weight.fill_(0.5)
        model.unused.bias.fill_(0.25)
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01, weight_decay=0.1)
    losses = steps(job, model, batches(2), optimizer)
    return {"losses": losses, **job.parameters(model), **job.gradients(model)}


@script("draws random numbers of python between steps")
def _(job: Job) -> Results:
    random.seed(job.rank)
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = []
    optimizer = sgd(model)
    for one in batches(2):
        random.random()
        torch.rand(job.rank + 1)
        losses.append(step(job, model, one, optimizer))
    return {"losses": losses, **job.parameters(model)}


@script("prints the model and its parameters")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    sizes = {name: str(tuple(p.shape)) for name, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    return {"text": repr(model), "total": total, **sizes}


@script("logs the norm of each weight and gradient")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward()
    tensors = [p.detach() for p in model.parameters()] + [p.grad for p in trained(model) if p.grad is not None]
    norms, means = [float(t.norm()) for t in tensors], [float(t.mean()) for t in tensors]
    norms += [float(t.abs().max()) for t in tensors] + [t.std().item() for t in tensors]
    return {"norms": norms, "means": means}
