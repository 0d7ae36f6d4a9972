"""What scripts put in the place of a model's forward after the call: on the model itself, on submodules, around it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.scripts.job import Job, Made, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import sgd, step


def _sharper(model: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Another forward of the perceptron, without its second layer."""
    logits = model.last(torch.sin(model.first(x)))
    return {"loss": functional.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


def _around(job: Job, made: Made, *changes: Callable[[Any], Any], **options: Any) -> Results:
    """Train a step, and two after each change; evaluate last."""
    model, batch = made
    job.parallel(model, batch, **options)
    losses = [step(job, model, batch, sgd(model))]
    for change in changes:
        change(model)
        optimizer = sgd(model)
        losses += [step(job, model, batch, optimizer) for _ in range(2)]
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model(**job.rows(batch))))
    return {"losses": losses, **job.parameters(model)}


def _assign(forward: Callable[..., Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.forward = forward

    return change


def _method(model: Any) -> None:
    model.forward = MethodType(_sharper, model)


@script("assigns another forward to the model, as a method")
def _(job: Job) -> Results:
    return _around(job, job.mlp(), _method)


@script("assigns another forward to the model, as a function that has the model")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    return _around(job, (model, batch), _assign(functools.partial(_sharper, model)))


@script("assigns another forward to the model and takes it away again")
def _(job: Job) -> Results:
    return _around(job, job.mlp(), _method, lambda model: delattr(model, "forward"), _method)


@script("assigns another forward to the model and puts back the one that it had")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    kept: list[Any] = []

    def change(model: Any) -> None:
        kept.append(model.forward)
        _method(model)

    return _around(job, (model, batch), change, lambda model: setattr(model, "forward", kept[0]))


@script("assigns another forward to the model within a block")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer, losses = sgd(model), list[Any]()
    for _ in range(2):
        losses.append(step(job, model, batch, optimizer))
        before = model.forward
        try:
            _method(model)
            losses.append(step(job, model, batch, optimizer))
        finally:
            model.forward = before  # type: ignore[method-assign]
    return {"losses": losses, **job.parameters(model)}


@script("assigns one forward after another to the model")
def _(job: Job) -> Results:
    def other(model: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(model.last(torch.tanh(model.first(x))), labels)}

    return _around(job, job.mlp(), _method, lambda model: setattr(model, "forward", MethodType(other, model)))


@script("assigns a forward of other arguments to the model")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]

    def forward(features: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(model.last(model.first(features)), targets)

    model.forward = forward  # type: ignore[method-assign]
    optimizer = sgd(model)
    rows = job.rows(batch)
    for _ in range(2):
        loss = model(rows["x"], rows["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, **job.parameters(model)}


@script("wraps the model's forward after the call, and changes its loss")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        before = model.forward

        @functools.wraps(before)
        def doubled(*args: Any, **kwargs: Any) -> Any:
            output = before(*args, **kwargs)
            return {**output, "loss": 2 * output["loss"]}

        model.forward = doubled

    return _around(job, job.mlp(), change, change)


@script("wraps the model's forward by an attribute that keeps the one before")
def _(job: Job) -> Results:
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        output = model._old_forward(*args, **kwargs)
        return {**output, "loss": output["loss"] * 0.5}

    def change(model: Any) -> None:
        object.__setattr__(model, "_old_forward", model.forward)
        model.forward = functools.partial(forward, model)

    return _around(job, job.mlp(), change)


@script("keeps the forward before in another one, which never calls it", refused="has not called it")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        before = model.forward

        def forward(x: Tensor, labels: Tensor) -> Any:
            return _sharper(model, x, labels) if before is not None else None

        model.forward = forward

    return _around(job, job.mlp(), change)


@script("assigns a forward to the model that branches on a value", refused="cannot capture the model")
def _(job: Job) -> Results:
    model, batch = job.mlp()

    def forward(x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return _sharper(model, x if x.sum() > 0 else -x, labels)

    return _around(job, (model, batch), _assign(forward))


@script("assigns another forward to the model on one rank alone", refused="on rank", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    return _around(job, job.mlp(), lambda model: _method(model) if job.rank == 0 else None)


@script("assigns another forward to a model that runs as it is", settings=("one", "dp2", "dp4"))
def _(job: Job) -> Results:
    return _around(job, job.mlp(), _method, capture="eager")


@script("copies a model whose forward was assigned after the call")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]
    _method(model)
    copied = copy.deepcopy(model)
    losses += [step(job, one, batch, sgd(one)) for one in (copied, model)]
    return {"losses": losses, **job.parameters(model), **job.parameters(copied, "copied ")}


@script("assigns another forward to a copy of the model, before its first call", refused="before its first call")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    copied = copy.deepcopy(model)
    _method(copied)
    losses = [step(job, one, batch, sgd(one)) for one in (copied, model)]
    return {"losses": losses, **job.parameters(model), **job.parameters(copied, "copied ")}


@script("assigns another forward and calls submodules in evaluation, whole")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    _method(model)
    losses = [step(job, model, batch, sgd(model))]
    model.eval()
    if job.is_plain:
        return {"losses": losses, "loss": model(**batch)["loss"].detach()}
    with model.hetu.whole(), torch.no_grad():
        return {"losses": losses, "loss": model(**batch)["loss"].detach()}


@script("assigns other forwards to submodules as methods, and takes them away")
def _(job: Job) -> Results:
    def doubled(layer: Any, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, layer.weight, layer.bias)

    return _around(
        job,
        job.mlp(),
        lambda model: setattr(model.middle, "forward", MethodType(doubled, model.middle)),
        lambda model: delattr(model.middle, "forward"),
    )
