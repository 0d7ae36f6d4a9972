"""Ways of training that take gradients apart: penalties, several losses, several models, sharpness, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.scripts.job import Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL
from tests.scripts.training import batches, sgd, steps, trained

INPUTS = "needs a gradient"


def _without_labels(job: Job) -> tuple[Any, Tensor, Tensor]:
    """Return a perceptron that returns logits alone, this rank's rows, and their labels."""
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    return model, job.cut(batch["x"]), job.cut(labels)


@script("penalizes the gradient of a critic at its inputs (WGAN-GP)", refused="inside model.hetu.whole()")
def _(job: Job) -> Results:
    critic, x, _ = _without_labels(job)
    between = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x=between)["logits"].sum(), between, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    return job.gradients(critic)


@script("penalizes the gradient of a critic inside whole()")
def _(job: Job) -> Results:
    critic, x, _ = _without_labels(job)
    between = x.clone().requires_grad_()
    inside = torch.enable_grad() if job.is_plain else critic.hetu.whole()
    with inside:
        (gradient,) = torch.autograd.grad(critic(x=between)["logits"].sum(), between, create_graph=True)
    return {"penalty": job.gathered((gradient.norm(dim=1) - 1) ** 2)}


class Critic(nn.Module):
    """A critic whose loss has the penalty of its gradient at the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        x = x.detach().requires_grad_()
        value = self.last(self.first(x).tanh())
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return {"loss": value.mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()}


def _critic(job: Job, **options: Any) -> Results:
    torch.manual_seed(3)
    critic = Critic().double()
    x = batches(1)[0]["x"]
    job.parallel(critic, {"x": x}, **options)
    optimizer = sgd(critic)
    for one in batches(2):
        loss_of(critic(x=job.cut(one["x"]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return job.parameters(critic)


script("has the penalty of its gradient (create_graph) in its forward", refused='capture="eager"')(_critic)


@script("has the penalty of its gradient in a forward that runs as it is", settings=("one", "dp2", "dp4"))
def _(job: Job) -> Results:
    return _critic(job, **({} if job.is_plain else {"capture": "eager"}))


@script("takes the gradient of each task's loss (retain_graph) and adds them up by hand")
def _(job: Job) -> Results:
    model, x, labels = _without_labels(job)
    logits = model(x=x)["logits"]
    tasks = functional.cross_entropy(logits, labels), logits.square().mean()
    found = [torch.autograd.grad(task, trained(model), retain_graph=True) for task in tasks]
    for parameter, one, other in zip(trained(model), *found, strict=True):
        dot = (one * other).sum()
        parameter.grad = one + other - (dot / other.norm() ** 2) * other if float(dot) < 0 else one + other
    return job.gradients(model)


@script("weighs tasks by the norms of their gradients at the last layer (GradNorm)")
def _(job: Job) -> Results:
    model, x, labels = _without_labels(job)
    logits = model(x=x)["logits"]
    tasks = functional.cross_entropy(logits, labels), logits.square().mean()
    norms = [torch.autograd.grad(task, model.last.weight, retain_graph=True)[0].norm() for task in tasks]
    (tasks[0] / float(norms[0]) + tasks[1] / float(norms[1])).backward()
    return {"norms": [float(norm) for norm in norms], **job.gradients(model)}


@script("calls torch.autograd.backward on two losses")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    torch.autograd.backward([loss_of(model(**job.rows(one))) for one in batches(2)])
    return job.gradients(model)


@script("passes backward a gradient")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    loss.backward(torch.tensor(0.5, dtype=loss.dtype))
    return job.gradients(model)


@script("passes backward gradients of the outputs")
def _(job: Job) -> Results:
    model, x, _ = _without_labels(job)
    logits = model(x=x)["logits"]
    torch.manual_seed(5)
    logits.backward(job.cut(torch.randn(8, 5, dtype=logits.dtype)) * job.world)  # ranks are averaged
    return job.gradients(model)


@script("accumulates by torch.autograd.grad")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    total: list[Tensor] = []
    for one in batches(3):
        found = torch.autograd.grad(loss_of(model(**job.rows(one))) / 3, trained(model))
        total = list(found) if not total else [a + b for a, b in zip(total, found, strict=True)]
    for parameter, gradient in zip(trained(model), total, strict=True):
        parameter.grad = gradient
    sgd(model).step()
    return job.parameters(model)


@script("asks for the gradient of what the loss does not need (allow_unused)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    apart = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = loss_of(model(**job.rows(batch)))
    found, none = torch.autograd.grad(loss, [model.last.bias, apart], allow_unused=True)
    return {"found": whole(found), "none": str(none)}


@script("steps to the sharpest point nearby and back (SAM)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
        norm = torch.stack([p.grad.norm() for p in trained(model)]).norm()
        moves = [0.05 * p.grad / norm for p in trained(model)]
        with torch.no_grad():
            for parameter, move in zip(trained(model), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss_of(model(**job.rows(one))).backward()
        with torch.no_grad():
            for parameter, move in zip(trained(model), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return job.parameters(model)


@script("hooks the logits and keeps their gradient")
def _(job: Job) -> Results:
    model, x, labels = _without_labels(job)
    logits = model(x=x)["logits"]
    logits.retain_grad()
    logits.register_hook(lambda gradient: gradient * 2)
    functional.cross_entropy(logits, labels).backward()
    return {"logits": job.gathered(logits.grad / job.world), **job.gradients(model)}


@script("reverses the gradient between two models (domain adaptation)", refused=INPUTS)
def _(job: Job) -> Results:
    features, x, labels = _without_labels(job)
    torch.manual_seed(3)
    judge = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    job.parallel(judge, (torch.randn(8, 5, dtype=torch.float64),))
    logits = features(x=x)["logits"]
    logits.register_hook(lambda gradient: -gradient)
    functional.cross_entropy(judge(logits), labels).backward()
    return {**job.gradients(features), **{f"judge {k}": v for k, v in job.gradients(judge).items()}}


@script("runs one parallel model on another's outputs", refused=INPUTS)
def _(job: Job) -> Results:
    features, x, labels = _without_labels(job)
    torch.manual_seed(3)
    head = nn.Sequential(nn.Tanh(), nn.Linear(5, 5)).double()
    job.parallel(head, (torch.randn(8, 5, dtype=torch.float64),))
    optimizers = sgd(features), sgd(head)
    for _ in range(2):
        functional.cross_entropy(head(features(x=x)["logits"]), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {**job.parameters(features), **job.parameters(head, "head ")}


@script("trains a head on a frozen parallel model's outputs")
def _(job: Job) -> Results:
    features, batch = job.mlp()
    labels = batch.pop("labels")
    features.requires_grad_(False)
    job.parallel(features, batch)
    torch.manual_seed(3)
    head = nn.Sequential(nn.Tanh(), nn.Linear(5, 5)).double()
    job.parallel(head, (torch.randn(8, 5, dtype=torch.float64),))
    logits = features(x=job.cut(batch["x"]))["logits"]
    functional.cross_entropy(head(logits), job.cut(labels)).backward()
    return {"needs": str(logits.requires_grad), **job.gradients(head)}


@script("compares an anchor with a positive and a negative (triplets, three calls)")
def _(job: Job) -> Results:
    model, _, _ = _without_labels(job)
    anchor, positive, negative = (model(x=job.cut(one["x"]))["logits"] for one in batches(3))
    functional.triplet_margin_loss(anchor, positive, negative, margin=5.0).backward()
    found = job.gradients(model)
    del found["gradient last.bias"]  # zero but for rounding
    return found


@script("stops the gradient on one of two branches (BYOL, SimSiam)")
def _(job: Job) -> Results:
    model, _, _ = _without_labels(job)
    first, second = (model(x=job.cut(one["x"]))["logits"] for one in batches(2))
    (-functional.cosine_similarity(first, second.detach(), dim=-1).mean()).backward()
    return job.gradients(model)


@script("learns from a teacher that is an average of itself (mean teacher)")
def _(job: Job) -> Results:
    student, batch = job.mlp()
    teacher, _ = job.mlp()
    batch.pop("labels")
    job.parallel(student, batch)
    job.parallel(teacher, batch)
    optimizer = sgd(student)
    for one in batches(3):
        with torch.no_grad():
            target = teacher(x=job.cut(one["x"]) + 0.1)["logits"]
        functional.mse_loss(student(x=job.cut(one["x"]))["logits"], target).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return job.parameters(teacher)


@script("switches gradients on and off (set_grad_enabled)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = []
    for i, one in enumerate(batches(4)):
        with torch.set_grad_enabled(i % 2 == 0):
            loss = loss_of(model(**job.rows(one)))
        losses.append(float(loss.detach()))
        if loss.requires_grad:
            loss.backward()
    return {"losses": losses, **job.gradients(model)}


@script("calls backward on a loss made under no_grad")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with torch.no_grad():
        loss = loss_of(model(**job.rows(batch)))
    try:
        loss.backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


@script("calls backward twice without retain_graph", refused="a second time", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    loss.backward()
    loss.backward()
    return job.gradients(model)


@script("trains on rows of high loss only (hard examples)")
def _(job: Job) -> Results:
    model, x, labels = _without_labels(job)
    each = functional.cross_entropy(model(x=x)["logits"], labels, reduction="none")
    chosen = (each.detach() > 1.6).to(each.dtype)
    (each * chosen).mean().backward()
    return job.gradients(model)


@script("mixes rows and labels (mixup) in the loop")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    labels = batch.pop("labels")
    job.parallel(model, batch)
    x = 0.7 * batch["x"] + 0.3 * batch["x"].flip(0)
    logits = model(x=job.cut(x))["logits"]
    one, other = (functional.cross_entropy(logits, job.cut(part)) for part in (labels, labels.flip(0)))
    (0.7 * one + 0.3 * other).backward()
    return job.gradients(model)


@script("computes the jacobian of an output", refused=INPUTS)
def _(job: Job) -> Results:
    model, x, _ = _without_labels(job)
    rows = x.clone().requires_grad_()
    logits = model(x=rows)["logits"]
    found = [torch.autograd.grad(logits[:, k].sum(), rows, retain_graph=True)[0] for k in range(logits.shape[1])]
    return {"jacobian": job.gathered(torch.stack(found, 1))}


@script("attacks a frozen model's inputs in several steps (PGD)", refused=INPUTS)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.requires_grad_(False)
    job.parallel(model, batch)
    rows = job.rows(batch)
    x = rows["x"]
    for _ in range(3):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(**{**rows, "x": x})), x)
        x = x + 0.01 * gradient.sign()
    return {"x": job.gathered(x)}


@script("recomputes the whole parallel model by torch.utils.checkpoint")
def _(job: Job) -> Results:
    model, x, labels = _without_labels(job)
    logits = torch.utils.checkpoint.checkpoint(lambda rows: model(x=rows)["logits"], x, use_reentrant=False)
    functional.cross_entropy(logits, labels).backward()
    return job.gradients(model)


@script("saves what backward needs on the host (save_on_cpu)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model(**job.rows(batch)))
    loss.backward()
    return job.gradients(model)


@script("learns to learn through a step (MAML)", refused="second derivative")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    loss = loss_of(model(**job.rows(batch)))
    found = torch.autograd.grad(loss, trained(model), create_graph=True)
    named = dict(zip((n for n, p in model.named_parameters() if p.requires_grad), trained(model), strict=True))
    fast = {n: p - 0.1 * g for (n, p), g in zip(named.items(), found, strict=True)}
    loss_of(torch.func.functional_call(model, fast, kwargs=job.rows(batch))).backward()
    return job.gradients(model)


OUTSIDE = "from outside of the model's own calls"
Extra = Callable[[nn.Module, Tensor], Tensor]  # a loss of submodules or parameters alone, of rows


def _features(model: Any, x: Tensor) -> Tensor:
    return model.first(x).tanh().mean()


def _product(model: Any, x: Tensor) -> Tensor:
    return functional.linear(x, model.first.weight).square().mean()


def _orthogonality(model: Any, x: Tensor) -> Tensor:
    weight = model.middle.weight
    return (weight @ weight.T - torch.eye(weight.shape[0], dtype=weight.dtype)).square().sum()


def _decay(model: Any, x: Tensor) -> Tensor:
    return sum((p.square().sum() for p in trained(model)), torch.zeros((), dtype=x.dtype))


def _trained_beside(job: Job, extra: Extra, rows: Callable[[Tensor], Tensor]) -> Results:
    """Train with a loss beside the model's, of rows of a batch for it."""
    model, batch = job.mlp()
    job.parallel(model, batch)
    beside = iter(batches(3))
    losses = steps(job, model, batches(3), sgd(model), lambda: (0.1 * extra(model, rows(next(beside)["x"]))).backward())
    return {"losses": losses, **job.parameters(model)}


def _enter_beside(what: str, extra: Extra) -> None:
    def own(job: Job) -> Results:
        return _trained_beside(job, extra, job.cut)

    def same(job: Job) -> Results:
        return _trained_beside(job, extra, lambda x: x)

    script(f"trains {what} alone, on one process", settings=("one",))(own)
    script(f"trains {what} alone, on the process's own rows", settings=SEVERAL, refused=OUTSIDE)(own)
    script(f"trains {what} alone, on the same rows on all processes", settings=SEVERAL)(same)


_enter_beside("a submodule", _features)
_enter_beside("a parameter", _product)


@script("keeps weights near to orthogonal by a loss of its own")
def _(job: Job) -> Results:
    return _trained_beside(job, _orthogonality, lambda x: x)


@script("decays weights by a loss of its own (L2)")
def _(job: Job) -> Results:
    return _trained_beside(job, _decay, lambda x: x)


@script("trains a submodule alone on one process of several", settings=SEVERAL, refused=OUTSIDE)
def _(job: Job) -> Results:
    """The others gather what it needs, and leave its loss alone."""

    def extra(model: Any, x: Tensor) -> Tensor:
        return _features(model, x) * (1.0 if job.rank == 0 else 0.0)

    return _trained_beside(job, extra, lambda x: x)
