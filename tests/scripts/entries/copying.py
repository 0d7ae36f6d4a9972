"""Copies, averages, and other ways in which scripts touch parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.scripts.job import Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, step, steps, trained


def trained_mlp(job: Job) -> tuple[Any, torch.optim.Optimizer]:
    """Return a parallel perceptron after two steps, and its optimizer."""
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    steps(job, model, batches(2), optimizer)
    return model, optimizer


def loss_on(job: Job, model: nn.Module) -> float:
    """Return the loss of a batch, without gradients."""
    with torch.no_grad():
        return float(loss_of(model(**job.rows(batches(1)[0]))))


def wholes(tensors: Any, prefix: str) -> dict[str, Tensor]:
    """Return whole tensors by name."""
    return {prefix + name: whole(value) for name, value in tensors.items()}


@script("copies the model and trains both")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    other = copy.deepcopy(model)
    first = steps(job, model, batches(1), optimizer)
    second = steps(job, other, batches(3), sgd(other))
    return {"first": first, "second": second, **job.parameters(model), **job.parameters(other, "other ")}


@script("keeps a copy as a frozen teacher")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    losses = []
    for batch in batches(3):
        losses += steps(job, model, [batch], optimizer)
        losses.append(loss_on(job, teacher))
    return {"losses": losses, **job.parameters(teacher)}


@script("averages with AveragedModel and evaluates the average")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    for batch in batches(3):
        losses += steps(job, model, [batch], optimizer)
        average.update_parameters(model)
        losses.append(loss_on(job, average))
    return {"losses": losses, **job.parameters(average)}


class OfBatch(nn.Module):
    """Calls a model by the names in a batch, for loops that pass one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


@script("updates the statistics of an averaged model")
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    average = AveragedModel(model)
    step(job, model, batch, sgd(model))
    average.update_parameters(model)
    average.update_parameters(model)
    update_bn([job.rows(batch)], OfBatch(average))
    return {**job.parameters(average), **job.buffers(average)}


@script("keeps an average of parameters by hand")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in batches(3):
        steps(job, model, [batch], optimizer)
        with torch.no_grad():
            for kept, parameter in zip(average, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
    return {f"average {number}": whole(kept) for number, kept in enumerate(average)}


@script("keeps an average of the state dict and saves it on the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches(3):
        steps(job, model, [batch], optimizer)
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
    if job.rank == 0:
        torch.save(average, job.folder / "average")
    job.barrier()
    return torch.load(job.folder / "average")


@script("swaps its average in, evaluates, and swaps it out")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    steps(job, model, batches(2), optimizer)
    kept = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    for parameter, value in zip(model.parameters(), average, strict=True):
        parameter.data.copy_(value.data)
    loss = loss_on(job, model)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(value.data)
    return {"loss": loss, "losses": steps(job, model, batches(1), optimizer), **job.parameters(model)}


@script("swaps its average in and saves it on the first rank")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    steps(job, model, batches(2), optimizer)
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average)
    if job.rank == 0:
        torch.save(model.state_dict(), job.folder / "average")
    job.barrier()
    model.load_state_dict(kept)
    return {**torch.load(job.folder / "average"), **job.parameters(model)}


@script("keeps an average of the state dict as whole tensors")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    average = {name: torch.tensor(value.numpy()) for name, value in model.state_dict().items()}
    for batch in batches(2):
        steps(job, model, [batch], optimizer)
        for name, value in model.state_dict().items():
            average[name].lerp_(torch.tensor(value.numpy()), 0.1)
    return average


@script("turns parameters into a vector and back")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() * 0.5, model.parameters())
    return {"vector": whole(vector), "losses": steps(job, model, batches(1), optimizer), **job.parameters(model)}


@script("assigns and copies into parameters' data")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    model.first.weight.data = model.first.weight.data * 0.5
    model.middle.weight.data.copy_(torch.eye(24, dtype=torch.float64))
    model.last.weight.data[0] = 0.25
    model.last.bias.data.clamp_(-0.1, 0.1)
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("initializes the model again")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)
            nn.init.zeros_(module.bias)

    model.apply(init)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("initializes the model again with random numbers")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    torch.manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("moves the model to where it is, and calls cpu()")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    model.to("cpu").cpu().to(torch.float64)
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("clips gradients by value and looks at them")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    loss_of(model(**job.rows(batches(1)[0]))).backward()
    norms = [float(parameter.grad.norm()) for parameter in trained(model)]  # type: ignore[union-attr]
    clip_grad_value_(model.parameters(), 0.01)
    extremes = [float(parameter.grad.abs().max()) for parameter in trained(model)]  # type: ignore[union-attr]
    found = job.gradients(model)
    model.zero_grad(set_to_none=False)
    zeros = [float(parameter.grad.abs().sum()) for parameter in trained(model)]  # type: ignore[union-attr]
    return {"norms": norms, "extremes": extremes, "zeros": zeros, **found}


@script("tells its parameters' names, shapes and numbers")
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    named = model.named_parameters()
    shapes = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad} {p.numel()}" for name, p in named]
    bits = model.get_memory_footprint()
    return {"shapes": shapes, "number": float(model.num_parameters()), "bytes": float(bits)}


@script("calls the model on other parameters by functional_call")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    halves = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    found = torch.func.functional_call(model, halves, (), job.rows(batches(1)[0]))
    return {"loss": float(loss_of(found).detach()), **job.parameters(model)}


@script("learns through parameters that it has made by functional_call")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    batch = job.rows(batches(1)[0])
    fast = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    loss_of(torch.func.functional_call(model, fast, (), batch)).backward()
    return {"loss": loss_on(job, model), **job.gradients(model)}


@script("takes gradients by torch.func.grad", refused="model.hetu.whole()")
def _(job: Job) -> Results:
    model, _ = trained_mlp(job)
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batch = job.rows(batches(1)[0])
    found = torch.func.grad(lambda its: loss_of(torch.func.functional_call(model, its, (), batch)))(given)
    return wholes(found, "gradient ")


@script("compiles the parallel model by torch.compile")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    compiled = torch.compile(model, backend="eager")
    losses = steps(job, compiled, batches(2), optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("compiles the model in place before it is parallel")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.compile(backend="eager")
    job.parallel(model, batch)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("compiles the parallel model in place")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    model.compile(backend="eager")
    return {"losses": steps(job, model, batches(2), optimizer), **job.parameters(model)}


@script("compiles a submodule before the model is parallel, and after")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.middle.compile(backend="eager")
    job.parallel(model, batch)
    losses = steps(job, model, batches(2), sgd(model))
    model.last.compile(backend="eager")
    return {"losses": losses + steps(job, model, batches(1), sgd(model)), **job.parameters(model)}


@script("replaces a submodule by its compiled self")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.middle = torch.compile(model.middle, backend="eager")
    job.parallel(model, batch)
    return {"losses": steps(job, model, batches(2), sgd(model)), **job.parameters(model)}


@script("resizes its embeddings before the call", tolerance=1e-5)
def _(job: Job) -> Results:
    model, batch = job.llama(tie_word_embeddings=True)
    vocabulary = model.config.vocab_size
    model.resize_token_embeddings(vocabulary + 4, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[vocabulary:] = 0.01
    job.parallel(model, batch)
    return {"loss": step(job, model, batch, sgd(model)), **job.parameters(model)}


@script("resizes its embeddings after the call", refused="before hetu_fx.auto_parallelize")
def _(job: Job) -> Results:
    model, batch = job.llama(tie_word_embeddings=True)
    job.parallel(model, batch)
    step(job, model, batch, sgd(model))
    vocabulary = model.config.vocab_size
    model.resize_token_embeddings(vocabulary + 4, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[vocabulary:] = 0.01
    return {"loss": step(job, model, batch, sgd(model)), **job.parameters(model)}


@script("ties its weights again", tolerance=1e-5)
def _(job: Job) -> Results:
    model, batch = job.llama(tie_word_embeddings=True)
    job.parallel(model, batch)
    model.tie_weights()
    return {"loss": step(job, model, batch, sgd(model)), **job.parameters(model)}


@script("puts the model into shared memory", refused="share")
def _(job: Job) -> Results:
    model, optimizer = trained_mlp(job)
    model.share_memory()
    return {"losses": steps(job, model, batches(1), optimizer), **job.parameters(model)}
