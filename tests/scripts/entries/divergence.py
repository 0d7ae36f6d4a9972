"""Ranks that leave the common path: every rank that the others wait for, or that waits, gets an error."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import hetu_fx
from tests.scripts.job import Batch, Job, loss_of, whole
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL

AWAY, UNLIKE = "did not come to where rank", "unlike calls"
PATIENCE, LONGER = 3.0, 7.0  # seconds: the bound of waits, and more than that
Act = Callable[[nn.Module, torch.optim.Optimizer, Batch], object]


def _start(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Train one step together."""
    model, batch = job.mlp()
    model = job.parallel(model, batch, options=hetu_fx.Options(wait_seconds=PATIENCE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = job.rows(batch)
    _step(model, optimizer, rows)
    return model, optimizer, rows


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Batch) -> None:
    optimizer.zero_grad()
    loss_of(model(**rows)).backward()
    optimizer.step()


def _wait_for_the_end(model: nn.Module, rows: Batch) -> None:
    """Be elsewhere for too long, then come back."""
    time.sleep(LONGER)
    model(**rows)


def _alone(act: Act) -> Callable[[Job], Results]:
    """Do something on rank 0 while the others sleep."""

    def run(job: Job) -> Results:
        model, optimizer, rows = _start(job)
        if job.rank == 0:
            act(model, optimizer, rows)
        else:
            _wait_for_the_end(model, rows)
        return {}

    return run


def _gradients(model: nn.Module, rows: Batch) -> None:
    loss_of(model(**rows)).backward()


script("calls the model on rank 0 alone", refused=AWAY, settings=SEVERAL)(_alone(lambda m, o, rows: m(**rows)))
script("compares gradients on rank 0 alone", refused=AWAY, settings=SEVERAL)(
    _alone(lambda m, o, rows: torch.equal(m.last.weight.grad, m.last.weight.grad))
)
script("gathers a whole parameter on rank 0 alone", refused=AWAY, settings=SEVERAL)(
    _alone(lambda m, o, rows: m.last.weight.full_tensor() if hasattr(m.last.weight, "full_tensor") else 0)
)
script("clips gradients on rank 0 alone", refused=AWAY, settings=SEVERAL)(
    _alone(lambda m, o, rows: float(nn.utils.clip_grad_norm_(m.parameters(), 1.0)))
)


@script("saves on rank 0 alone", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    if job.rank == 0 and not job.is_plain:
        model.hetu.save(job.folder / "saved")
    else:
        _wait_for_the_end(model, rows)
    return {}


@script("calls backward on rank 0 alone", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    optimizer.zero_grad()
    loss = loss_of(model(**rows))
    if job.rank == 0:
        loss.backward()
        float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    else:
        _wait_for_the_end(model, rows)
    return {}


@script(
    "evaluates with gradients on one rank while the others train", refused="ranks' batches differ", settings=SEVERAL
)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    if job.rank == 0:
        model.eval()
        model(**rows)
    else:
        _step(model, optimizer, rows)
    return {}


@script("makes one step more on rank 0 than on the others", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    for _ in range(2 if job.rank == 0 else 1):
        _step(model, optimizer, rows)
    if job.rank > 0:
        _wait_for_the_end(model, rows)
    return {}


@script("gathers a parameter on one rank while the others train to the next step", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    if job.rank == 0:
        whole(model.last.weight)
    _step(model, optimizer, rows)
    return {}


@script("takes a gradient's norm on one rank while the others train", settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    if job.rank == 0:
        float(model.last.weight.grad.norm())
    _step(model, optimizer, rows)
    return {}


@script("catches an error of its own code on one rank and skips the step", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    for step in range(3):
        try:
            if step == 1 and job.rank == 0:
                raise ValueError("a bad sample")
            _step(model, optimizer, rows)
        except ValueError:
            continue
    return {"norm": model.last.weight.grad.norm()}


@script("makes unlike losses of one output", settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    optimizer.zero_grad()
    loss = loss_of(model(**rows))
    (loss * (2.0 if job.rank == 0 else 1.0)).backward()
    return {}


@script("skips backward on one rank", refused=UNLIKE, settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(**rows))
        if job.rank == 0:
            loss.backward()
        optimizer.step()
    return {}


@script("takes almost as long on one rank as the others have patience for", settings=SEVERAL)
def _(job: Job) -> Results:
    model, optimizer, rows = _start(job)
    if job.rank == 0:
        time.sleep(2.0)
    _step(model, optimizer, rows)
    return {}


@script("takes a gradient's norm on one rank while the others take a sum", settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, _ = _start(job)
    gradient = model.last.weight.grad
    return {"norm": job.everyones(float(gradient.norm() if job.rank == 0 else gradient.sum()))[0]}


@script("clips gradients on one rank while the others take a norm", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    if job.rank == 0:
        float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    else:
        float(model.last.weight.grad.norm())
        _wait_for_the_end(model, rows)
    return {}


@script("saves on one rank while the others take a norm", refused="rank", settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    if job.rank == 0 and not job.is_plain:
        model.hetu.save(job.folder / "saved")
    float(model.last.weight.grad.norm())
    if job.rank > 0:
        _wait_for_the_end(model, rows)
    return {}


@script("calls backward of two models' losses in unlike order", refused=AWAY, settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    other, batch = job.mlp()
    other = job.parallel(other, batch, options=hetu_fx.Options(wait_seconds=PATIENCE))
    losses = [loss_of(one(**rows)) for one in (model, other)]
    for loss in losses if job.rank == 0 else losses[::-1]:
        loss.backward()
    return {}


@script("calls backward of two calls' losses in unlike order", refused=UNLIKE, settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    losses = [loss_of(model(**rows)) for _ in range(2)]
    for loss in losses if job.rank == 0 else losses[::-1]:
        loss.backward()
    return {}


@script("calls backward on one rank while the others take a norm", refused="rank", settings=SEVERAL)
def _(job: Job) -> Results:
    model, _, rows = _start(job)
    loss = loss_of(model(**rows))
    if job.rank == 0:
        loss.backward()
    else:
        float(model.last.weight.grad.norm())
        _wait_for_the_end(model, rows)
    return {}
