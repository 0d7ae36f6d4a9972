"""What scripts ask of autograd: other ways to gradients, gradients of other things, several models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetu_fx.plans.plan import Plan
from tests.scripts.job import Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, trained


@script("takes gradients by torch.autograd.grad")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    parameters = trained(model)
    found = torch.autograd.grad(loss_of(model(**job.rows(batch))), parameters)
    assert all(parameter.grad is None for parameter in parameters)
    return {f"gradient {i}": whole(gradient) for i, gradient in enumerate(found)}


@script("takes gradients by torch.autograd.grad and steps with them")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    parameters = trained(model)
    for one in batches(3):
        found = torch.autograd.grad(loss_of(model(**job.rows(one))), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter -= 0.1 * gradient
    return job.parameters(model)


@script("calls backward for some parameters only (inputs=)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward(inputs=[model.last.weight, model.last.bias])
    return job.gradients(model)


@script("calls backward twice with retain_graph")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    loss.backward(retain_graph=True)
    first = {f"first {name}": value for name, value in job.gradients(model).items()}
    loss.backward()
    return {**first, **job.gradients(model)}


@script("calls backward twice with retain_graph and clears gradients between")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    loss.backward(retain_graph=True)
    model.zero_grad()
    (3 * loss).backward()
    return job.gradients(model)


@script("penalizes the gradient's norm (create_graph)", refused="second derivative")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    gradients = torch.autograd.grad(loss, trained(model), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    return job.gradients(model)


@script("calls backward with create_graph", refused="second derivative")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward(create_graph=True)
    return job.gradients(model)


@script("adds the losses of two calls before one backward")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second = batches(2)
    (loss_of(model(**job.rows(first))) + 2 * loss_of(model(**job.rows(second)))).backward()
    return job.gradients(model)


@script("calls the model twice and backward in the other order")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second = (loss_of(model(**job.rows(one))) for one in batches(2))
    second.backward()
    first.backward()
    return job.gradients(model)


@script("compares the outputs of two calls (siamese)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    del batch["labels"]
    job.parallel(model, batch)
    a, b = (model(x=job.cut(one["x"]))["logits"] for one in batches(2))
    functional.mse_loss(a, b).backward()
    return job.gradients(model)


@script("computes the loss outside from the outputs")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    logits = model(x=job.cut(batch["x"]))["logits"]
    functional.cross_entropy(logits, job.cut(labels)).backward()
    return job.gradients(model)


@script("computes two losses outside from one output")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    logits = model(x=job.cut(batch["x"]))["logits"]
    functional.cross_entropy(logits, job.cut(labels)).backward(retain_graph=True)
    (0.1 * logits.square().mean()).backward()
    return job.gradients(model)


@script("adds to the model's loss a penalty on its logits")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch, **({} if job.is_plain else {"outputs": "all"}))
    output = model(**job.rows(batch))
    (output["loss"] + 0.1 * output["logits"].square().mean()).backward()
    return job.gradients(model)


@script("distils a teacher into a student")
def _(job: Job) -> Results:
    teacher, batch = job.mlp()
    student, _ = job.mlp()
    with torch.no_grad():
        student.last.weight.mul_(0.5)
    labels = batch.pop("labels")
    job.parallel(teacher, batch)
    job.parallel(student, batch)
    teacher.eval()
    with torch.no_grad():
        target = teacher(x=job.cut(batch["x"]))["logits"].softmax(-1)
    logits = student(x=job.cut(batch["x"]))["logits"]
    kl = functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
    (kl + functional.cross_entropy(logits, job.cut(labels))).backward()
    return job.gradients(student)


@script("trains a plain head on a parallel model's outputs")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    torch.manual_seed(3)
    head = nn.Linear(5, 5).double()
    logits = head(model(x=job.cut(batch["x"]))["logits"])
    functional.cross_entropy(logits, job.cut(labels)).backward()
    own = job.everyones(head.weight.grad)
    return {"head": sum(own) / job.world, **job.gradients(model)}


INPUTS = "needs a gradient"


@script("takes the gradient of an input (saliency)", refused=INPUTS)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    rows = job.rows(batch)
    rows["x"] = rows["x"].clone().requires_grad_()
    loss_of(model(**rows)).backward()
    assert rows["x"].grad is not None
    return {"input": job.gathered(rows["x"].grad / job.world), **job.gradients(model)}


@script("takes the gradient of an input in evaluation", refused=INPUTS)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    model.eval()
    rows = job.rows(batch)
    rows["x"] = rows["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model(**rows)), rows["x"])
    return {"input": job.gathered(gradient / job.world)}


@script("trains on adversarial samples (fast gradient sign)", refused=INPUTS)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        rows = job.rows(one)
        x = rows["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(**{**rows, "x": x})), x)
        optimizer.zero_grad()
        loss_of(model(**{**rows, "x": rows["x"] + 0.1 * gradient.sign()})).backward()
        optimizer.step()
    return job.parameters(model)


@script("trains a plain module before a parallel one", refused=INPUTS)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    torch.manual_seed(3)
    before = nn.Linear(10, 10).double()
    rows = job.rows(batch)
    loss_of(model(**{**rows, "x": before(rows["x"])})).backward()
    own = job.everyones(before.weight.grad)
    return {"before": sum(own) / job.world, **job.gradients(model)}


class Generator(nn.Module):
    """Makes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 10)

    def forward(self, z: Tensor) -> Tensor:
        """Return samples."""
        return self.second(torch.tanh(self.first(z)))


@script("trains a generator against a discriminator", refused=INPUTS)
def _(job: Job) -> Results:
    judge, batch = job.mlp()
    torch.manual_seed(3)
    maker = Generator().double()
    z = torch.randn(8, 6, dtype=torch.float64)
    labels = batch.pop("labels")
    job.parallel(judge, batch)
    job.parallel(maker, {"z": z})
    judges, makers = sgd(judge), sgd(maker)
    real, noise, labels = job.cut(batch["x"]), job.cut(z), job.cut(labels)
    for _ in range(2):
        fake = maker(z=noise)
        judges.zero_grad()
        loss = functional.cross_entropy(judge(x=real)["logits"], labels)
        (loss - judge(x=fake.detach())["logits"].mean()).backward()
        judges.step()
        makers.zero_grad()
        judge(x=fake)["logits"].mean().backward()
        makers.step()
    return {**job.parameters(judge, "judge "), **job.parameters(maker, "maker ")}


@script("reads the loss before backward")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    before = loss.item()
    loss.backward()
    return {"before": before, "after": loss.item(), **job.gradients(model)}


@script("weights the loss of the call by a tensor")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    weight = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    loss = loss_of(model(**job.rows(batch)))
    (loss * weight).backward()
    return {"weight": weight.grad, **job.gradients(model)}


@script("hooks the loss")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    loss.register_hook(lambda gradient: 3 * gradient)
    loss.backward()
    return job.gradients(model)


@script("hooks parameters to scale their gradients")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    model.last.weight.register_hook(lambda gradient: gradient * 2)
    model.middle.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


@script("hooks parameters before the model is parallel")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.last.weight.register_hook(lambda gradient: gradient * 2)
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


@script("hooks parameters after their gradients have accumulated")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    norms: list[float] = []
    model.last.weight.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.norm())))
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
    return {"norms": norms, **job.gradients(model)}


@script("looks for anomalies")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with torch.autograd.set_detect_anomaly(True):
        loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


@script("has a loss that is no number")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    rows = job.rows(batch)
    rows["x"] = rows["x"] * (float("nan") if job.rank == 0 else 1.0)
    loss = loss_of(model(**rows))
    loss.backward()
    return {"loss": loss.detach().isnan().double(), "gradient": whole(model.last.bias.grad).isnan().double()}


@script("forgets the gradients of some parameters")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
        model.first.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return job.parameters(model)


@script("detaches some of the losses of a batch")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    logits = model(x=job.cut(batch["x"]))["logits"]
    each = functional.cross_entropy(logits, job.cut(labels), reduction="none")
    keep = (job.cut(labels) > 1).to(each.dtype)
    (each * keep).mean().backward()
    return job.gradients(model)


class Checkpointed(nn.Module):
    """A perceptron whose middle is computed again in backward, with a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(10, 24), nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        inner = torch.utils.checkpoint.checkpoint(lambda h: self.middle(h).tanh(), self.first(x), use_reentrant=False)
        return {"loss": functional.cross_entropy(self.last(inner), labels)}


@script("recomputes a part by torch.utils.checkpoint")
def _(job: Job) -> Results:
    _, batch = job.mlp()
    torch.manual_seed(0)
    model = Checkpointed().double()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


class Scaled(nn.Module):
    """A perceptron with a function of its own that halves the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        hidden: Tensor = _Scaled.apply(self.first(x).tanh())
        return {"loss": functional.cross_entropy(self.last(hidden), labels)}


@script("has an autograd function of its own in the model", refused="autograd function")
def _(job: Job) -> Results:
    _, batch = job.mlp()
    torch.manual_seed(0)
    model = Scaled().double()
    job.parallel(model, batch)
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)


@script("steps with the gradients of a no_sync block")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    with getattr(model, "no_sync", torch.enable_grad)():
        loss_of(model(**job.rows(batch))).backward()
    optimizer.step()
    return job.parameters(model)


@script("looks at gradients inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with getattr(model, "no_sync", torch.enable_grad)():
        loss_of(model(**job.rows(batch))).backward()
        return job.gradients(model)


def _without_traffic(model: nn.Module) -> Any:
    return getattr(model, "no_sync", torch.enable_grad)()


@script("looks at gradients between two micro-batches of no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    norms = []
    for i, one in enumerate(batches(3)):
        with _without_traffic(model) if i < 2 else torch.enable_grad():
            loss_of(model(**job.rows(one))).backward()
            norms.append(float(model.last.weight.grad.norm()))
    return {"norms": norms, **job.gradients(model)}


@script("clears gradients that were made inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(3):
        with _without_traffic(model):
            loss_of(model(**job.rows(one))).backward()
        model.zero_grad()
        loss_of(model(**job.rows(one))).backward()
        optimizer.step()
    return job.parameters(model)


@script("accumulates inside no_sync on top of gradients from outside, and clears some")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second, third = batches(3)
    loss_of(model(**job.rows(first))).backward()
    with _without_traffic(model):
        loss_of(model(**job.rows(second))).backward()
    model.middle.weight.grad = None
    loss_of(model(**job.rows(third))).backward()
    return job.gradients(model)


@script("clips and steps after an epoch that ends inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        with _without_traffic(model):
            loss_of(model(**job.rows(one))).backward()
    norm = nn.utils.clip_grad_norm_(trained(model), 0.01)
    optimizer.step()
    return {"norm": float(norm), **job.parameters(model)}


@script("runs forwards under no_sync and backwards after it")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = []
    for one in batches(3):
        with _without_traffic(model):
            losses.append(loss_of(model(**job.rows(one))))
    norms = []
    for loss in losses:
        loss.backward()
        norms.append(float(model.last.weight.grad.norm()))
    return {"norms": norms, **job.gradients(model)}


@script("runs a forward before no_sync and its backward within")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second = batches(2)
    loss = loss_of(model(**job.rows(first)))
    with _without_traffic(model):
        loss.backward()
        loss_of(model(**job.rows(second))).backward()
    return job.gradients(model)


@script("steps inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    with _without_traffic(model):
        for one in batches(2):
            optimizer.zero_grad()
            loss_of(model(**job.rows(one))).backward()
            optimizer.step()
    return job.parameters(model)


@script("sets gradients to zero in place inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        with _without_traffic(model):
            loss_of(model(**job.rows(one))).backward()
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(**job.rows(one))).backward()
        loss_of(model(**job.rows(one))).backward()
        optimizer.step()
    return job.parameters(model)


@script("takes gradients by torch.autograd.grad inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with _without_traffic(model):
        found = torch.autograd.grad(loss_of(model(**job.rows(batch))), trained(model))
    return {f"gradient {i}": whole(gradient) for i, gradient in enumerate(found)}


@script("goes on under another variant inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    if not job.is_plain:
        model.hetu.add_variant(Plan.data_parallel(range(job.world)), name="other")
    names = [] if job.is_plain else list(model.hetu.variants)
    for i, one in enumerate(batches(4)):
        if names:
            model.hetu.switch(names[i % 2])
        with _without_traffic(model):
            loss_of(model(**job.rows(one))).backward()
    return job.gradients(model)


@script("takes gradients by torch.autograd.grad after no_sync has kept others")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, second, third = batches(3)
    with _without_traffic(model):
        loss_of(model(**job.rows(first))).backward()
    found = torch.autograd.grad(loss_of(model(**job.rows(second))), trained(model))
    loss_of(model(**job.rows(third))).backward(inputs=[model.last.weight])
    return {**{f"apart {i}": whole(gradient) for i, gradient in enumerate(found)}, **job.gradients(model)}


@script("hooks parameters and trains inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    first, *others = batches(3)
    with _without_traffic(model):
        loss_of(model(**job.rows(first))).backward()
        model.middle.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        for one in others:
            loss_of(model(**job.rows(one))).backward()
    return job.gradients(model)


@script("calls backward for some parameters only inside no_sync")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with _without_traffic(model):
        for one in batches(2):
            loss_of(model(**job.rows(one))).backward(inputs=[model.last.weight])
    loss_of(model(**job.rows(batch))).backward()
    return job.gradients(model)
