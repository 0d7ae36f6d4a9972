"""Precision as people ask for it. A witness in the loss tells which one it was, so that none passes for another."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.amp import GradScaler

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.scripts import models
from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import sgd, steps, trained

CLOSE = 4e-3
"""Half precision's rounding; the witness of another precision changes the loss by more than twice as much."""
EXACT = 1e-5

PROBE = 1 + 2**-10 + 2**-15  # all of it in float32, not the last part in float16, only 1 in bfloat16
bf16, fp16 = (partial(torch.autocast, "cpu", dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
off = partial(torch.autocast, "cpu", enabled=False)


class Witness(nn.Module):
    """A perceptron whose loss tells in which precision its probe ran: 33, 32 or 0 thirtieths more."""

    def __init__(self, inside: Any = nullcontext, around: Any = nullcontext, head: Any = nullcontext) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, models.HIDDEN)
        self.probe = nn.Linear(models.FEATURES, models.FEATURES, bias=False)
        self.last = nn.Linear(models.HIDDEN, models.CLASSES)
        self.contexts = (around, inside, head)
        self.probe.weight = nn.Parameter(PROBE * torch.eye(models.FEATURES), requires_grad=False)

    def hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden values, and the witness of each row."""
        around, inside, _ = self.contexts
        with around():
            hidden = torch.tanh(self.first(x)).to(x.dtype)
            with inside():
                seen = self.probe(torch.ones_like(x))
        return hidden, (seen.double() - 1).mean(1) * 2**15 / 30

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits and the witness, and the loss where there are labels."""
        hidden, seen = self.hidden(x)
        with self.contexts[2]():
            logits = self.last(hidden)
        if labels is None:
            return {"logits": logits, "seen": seen}
        loss = nn.functional.cross_entropy(logits, labels) + seen.mean().float()
        return {"loss": loss, "logits": logits}


class Tokens(Witness):
    """The same on integers, whose dtype does not tell what precision the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.CLASSES, models.FEATURES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the witness does on embeddings of the labels."""
        assert labels is not None
        return super().forward(self.embed(labels), labels)


def _made(model: type[nn.Module] = Witness, **contexts: Any) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    built = model(**contexts)
    torch.manual_seed(1)
    return built, [models.vectors() for _ in range(3)]


def _train(job: Job, call: Any, plan: Plan | None = None, **contexts: Any) -> Results:
    """Train with the call in a context."""
    model, batches = _made(**contexts)
    job.parallel(model, job.rows(batches[0]), **({} if plan is None else {"plan": plan}))
    optimizer, losses = sgd(model), []
    for batch in batches:
        with call():
            output = model(**job.rows(batch))
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output["loss"].detach()))
    return {"losses": losses, "dtype": str(output["loss"].dtype), **job.parameters(model)}


def _micro_batches(job: Job) -> Plan:
    """Return a plan that runs backward inside forward."""
    pipelines = tuple(
        Pipeline((Stage((rank,)),), share=1 + 2 * (rank == 0), micro_batches=2) for rank in range(job.world)
    )
    return Plan(pipelines)


@script("runs the call under autocast in bfloat16", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, bf16)


@script("runs the call under autocast in float16, without a scaler", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, fp16)


@script("runs the call under autocast without its cache", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, partial(bf16, cache_enabled=False))


@script("runs the call under an autocast that is not enabled", tolerance=EXACT)
def _(job: Job) -> Results:
    return _train(job, off)


@script("runs the call under autocast in micro-batches", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, bf16, plan=_micro_batches(job))


@script("has autocast around a part of its forward", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, nullcontext, around=bf16)


@script("turns autocast off for a part of its forward", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, bf16, inside=off)


@script("has autocast of one dtype within that of another", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _train(job, bf16, inside=fp16, head=bf16)


@script("changes between precisions from step to step", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, (batch, *_) = _made()
    job.parallel(model, job.rows(batch))
    losses: list[float] = []
    for context in (nullcontext, bf16, fp16, off, bf16):
        with context():
            losses.append(float(loss_of(model(**job.rows(batch))).detach()))
    return {"losses": losses}


@script("has a loss function inside autocast", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _with_loss_fn(job, bf16)


def _with_loss_fn(job: Job, around: Any) -> Results:
    model, batches = _made()

    def loss_fn(output: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        again = output["logits"] @ torch.eye(models.CLASSES)
        return nn.functional.cross_entropy(again, labels) + output["seen"].mean()

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            made: dict[str, Tensor] = self.inner(x)
            return made

    bare = Bare()
    job.parallel(bare, job.rows(batches[0]), loss_fn=loss_fn)
    optimizer, losses = sgd(bare), []
    for batch in batches:
        with around():
            mine = job.rows(batch)
            made = bare(**mine)
            loss = loss_fn(made, **mine) if job.is_plain else made.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(bare)}


@script("computes its loss of outputs, outside of autocast", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, batches = _made()
    mine = job.rows(batches[0])
    job.parallel(model, {"x": mine["x"]})
    with bf16():
        made = model(mine["x"])
    dtype = made["logits"].dtype
    loss = nn.functional.cross_entropy(made["logits"].float(), mine["labels"]) + made["seen"].mean()
    loss.backward()
    total = sum(float(value) for value in job.everyones(loss.detach())) / job.world
    return {"loss": total, "dtype": str(dtype), **job.gradients(model)}


@script("evaluates under autocast what it trained without", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, batches = _made()
    job.parallel(model, job.rows(batches[0]))
    losses = steps(job, model, batches[:1], sgd(model))
    model.eval()
    with torch.no_grad(), bf16():
        made = model(**job.rows(batches[1]))
    with torch.no_grad():
        plain = model(**job.rows(batches[1]))
    logits = {"half": job.gathered(made["logits"]), "single": job.gathered(plain["logits"])}
    return {"losses": [*losses, float(made["loss"]), float(plain["loss"])], **logits}


def _converted(job: Job, convert: Any, after: bool = True, **options: Any) -> Results:
    built, batches = _made(Tokens)
    if not after:
        convert(built)
    job.parallel(built, job.rows(batches[0]), **options)
    losses = steps(job, built, batches[:1], sgd(built))
    if after:
        convert(built)
    optimizer = sgd(built)
    losses += steps(job, built, batches, optimizer)
    dtypes = [str(parameter.dtype) for parameter in built.parameters()]
    return {"losses": losses, "dtypes": dtypes, **job.parameters(built)}


@script("converts the model to bfloat16 before the call", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.to(torch.bfloat16), after=False)


@script("converts the model to bfloat16 after the call", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.to(torch.bfloat16))


@script("halves the model after the call", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.half())


@script("doubles the model after the call", tolerance=EXACT)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.double())


@script("converts the model there and back", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.half().float())


def _as_it_is(job: Job) -> dict[str, Any]:
    """Return the options of a module that runs as it is, data parallel."""
    shares = [3, *[1] * (job.world - 1)]
    return {"capture": "eager", "plan": Plan.data_parallel(range(job.world), shares)}


@script("converts a model that runs without a graph", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _converted(job, lambda model: model.to(torch.bfloat16), **_as_it_is(job))


@script("runs a model without a graph under autocast", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, batches = _made()
    job.parallel(model, job.rows(batches[0]), **_as_it_is(job))
    losses = []
    for context in (nullcontext, bf16, fp16):
        with context():
            losses.append(float(loss_of(model(**job.rows(batches[0]))).detach()))
    return {"losses": losses}


@script("keeps its optimizer when the model is converted", tolerance=EXACT)
def _(job: Job) -> Results:
    model, batches = _made(Tokens)
    job.parallel(model, job.rows(batches[0]))
    optimizer = sgd(model)
    losses = steps(job, model, batches[:1], optimizer)
    model.double()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    losses += steps(job, model, batches, optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("converts the model under gradients that are there", tolerance=EXACT)
def _(job: Job) -> Results:
    model, batches = _made(Tokens)
    job.parallel(model, job.rows(batches[0]))
    loss_of(model(**job.rows(batches[0]))).backward()
    model.double()
    loss_of(model(**job.rows(batches[1]))).backward()
    return job.gradients(model)


@script("builds its model under another default dtype", tolerance=1e-7)
def _(job: Job) -> Results:
    torch.set_default_dtype(torch.float64)
    return _train(job, nullcontext)


class Fresh(Witness):
    """Makes a tensor of the default dtype in its forward."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the witness does, and a loss that a third rounds."""
        made = super().forward(x, labels)
        third = torch.ones(1) / 3
        return {**made, "loss": made["loss"] + (third.double() * 3 - 1).abs().sum() * 2**24}


@script("changes the default dtype after the call", tolerance=EXACT)
def _(job: Job) -> Results:
    model, (batch, *_) = _made(Fresh)
    job.parallel(model, job.rows(batch))
    losses = [float(loss_of(model(**job.rows(batch))).detach())]
    torch.set_default_dtype(torch.float64)
    losses.append(float(loss_of(model(**job.rows(batch))).detach()))
    return {"losses": losses}


def _accelerated(job: Job, order: str = "first", model: Any = Witness, **options: Any) -> Results:
    """Train with an Accelerator that is there first, or made after the model is parallel."""
    built, batches = _made(model)
    made = Accelerator(**options) if order == "first" else None
    job.parallel(built, job.rows(batches[0]))
    accelerator = made or Accelerator(**options)
    built, optimizer = accelerator.prepare(built, sgd(built))
    losses = []
    for batch in batches:
        output = built(**job.rows(batch))
        accelerator.backward(output["loss"])
        accelerator.clip_grad_norm_(built.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output["loss"].detach()))
    whole = job.parameters(accelerator.unwrap_model(built))
    return {"losses": losses, "dtype": str(output["loss"].dtype), **whole}


@script("has an Accelerator of bf16, made first", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _accelerated(job, mixed_precision="bf16")


@script("has an Accelerator of bf16, made last", tolerance=CLOSE)
def _(job: Job) -> Results:
    return _accelerated(job, "last", mixed_precision="bf16")


@script("has an Accelerator without mixed precision", tolerance=EXACT)
def _(job: Job) -> Results:
    return _accelerated(job, mixed_precision="no")


@script("has an Accelerator of fp16, which accelerate leaves out on CPUs", tolerance=EXACT)
def _(job: Job) -> Results:
    return _accelerated(job, mixed_precision="fp16")


@script("has an Accelerator whose autocast is turned off", tolerance=EXACT)
def _(job: Job) -> Results:
    return _accelerated(job, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])


@script("gets bf16 from accelerate's environment", tolerance=CLOSE)
def _(job: Job) -> Results:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    try:
        return _accelerated(job)
    finally:
        del os.environ["ACCELERATE_MIXED_PRECISION"]


@script("opens accelerator.autocast() and turns it off inside", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, (batch, *_) = _made()
    accelerator = Accelerator(mixed_precision="bf16")
    job.parallel(model, job.rows(batch))
    losses = []
    for handler in (None, AutocastKwargs(enabled=False)):
        with accelerator.autocast(handler) if handler else accelerator.autocast():
            losses.append(float(loss_of(model(**job.rows(batch))).detach()))
    losses.append(float(loss_of(model(**job.rows(batch))).detach()))
    return {"losses": losses}


@script("unwraps a bf16 model for evaluation in fp32", tolerance=EXACT)
def _(job: Job) -> Results:
    model, (batch, *_) = _made()
    accelerator = Accelerator(mixed_precision="bf16")
    job.parallel(model, job.rows(batch))
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    with torch.no_grad():
        return {"loss": float(loss_of(unwrapped(**job.rows(batch))))}


def _trainer(job: Job, **options: Any) -> Results:
    from transformers import Trainer, TrainingArguments

    model, (batch, *_) = _made(Tokens)
    job.parallel(model, job.rows(batch))
    data = [{name: tensor[row] for name, tensor in batch.items()} for row in range(8)]
    arguments = TrainingArguments(
        output_dir=str(job.folder), per_device_train_batch_size=8 // job.world, max_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, data_seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.evaluate(data)
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return {"losses": losses, **job.parameters(model)}


@script("trains by Trainer in bf16", tolerance=CLOSE, seconds=120)
def _(job: Job) -> Results:
    return _trainer(job, bf16=True)


@script("evaluates by Trainer in full bf16", tolerance=CLOSE, seconds=120)
def _(job: Job) -> Results:
    return _trainer(job, bf16_full_eval=True)


@script("evaluates a batch of which one rank has all rows", tolerance=CLOSE)
def _(job: Job) -> Results:
    model, (batch, *_) = _made(Tokens)
    job.parallel(model, job.rows(batch))
    model.eval()
    mine = batch if job.rank == 0 else {name: value[:0] for name, value in batch.items()}
    with torch.no_grad():
        return {"loss": model(**mine)["loss"]}


def _scaled(
    job: Job,
    plan: Plan | None = None,
    small: float = 1.0,
    spoilt: int = -1,
    scale: float = 4096.0,
    backoff: float = 0.5,
) -> Results:
    """Train in float16 with a scaler; the gradients are `small`, the batch numbered `spoilt` overflows on one rank.

    No scale is at the edge: where it is, a sum over all rows overflows though none over a rank's rows does.
    """
    model, batches = _made()
    job.parallel(model, job.rows(batches[0]), **({} if plan is None else {"plan": plan}))
    optimizer = sgd(model, lr=0.1 / small)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2, backoff_factor=backoff)
    found: dict[str, list[float]] = {"losses": [], "scales": [], "norms": []}
    for number, batch in enumerate([*batches, *batches]):
        if number == spoilt:
            batch = {**batch, "x": torch.cat([batch["x"][:-1], torch.full_like(batch["x"][-1:], 7e4)])}
        with fp16():
            loss = loss_of(model(**job.rows(batch)))
        scaler.scale(loss * small).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(trained(model), 1.0 * small) / small
        found["norms"].append(_number(norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["losses"].append(_number(loss.detach()))
        found["scales"].append(scaler.get_scale())
    return {**found, **job.parameters(model)}


def _number(tensor: Tensor) -> float:
    """Return a number, -1 where it is none that could be compared."""
    return float(tensor) if tensor.isfinite() else -1.0


@script("scales the loss of float16", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job)


@script("scales the loss of float16 in micro-batches", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, _micro_batches(job))


@script("has gradients in float16 that only the scaler saves", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, small=1e-7, scale=65536.0)


@script("has gradients in float16 that only the scaler saves, in micro-batches", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, _micro_batches(job), small=1e-7, scale=65536.0)


@script("skips the step in which one rank's rows overflow", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, spoilt=1)


@script("skips the step in which one rank's rows overflow, in micro-batches", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, _micro_batches(job), spoilt=1)


@script("begins with a scale that overflows", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, scale=2.0**24, backoff=2.0**-8)


@script("begins with a scale that overflows, in micro-batches", tolerance=2 * CLOSE)
def _(job: Job) -> Results:
    return _scaled(job, _micro_batches(job), scale=2.0**24, backoff=2.0**-8)
