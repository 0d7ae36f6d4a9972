"""What scripts do on one process alone, or unlike on each: to rates, states, gradients, buffers, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL
from tests.scripts.training import batches, sgd, steps, trained

Change = Callable[[Job, Any, torch.optim.Optimizer], Any]


def _enter(name: str, change: Change, *, between: bool = False, **options: Any) -> None:
    """Enter a change after two steps, or between backward and update of each; two follow, and an evaluation."""

    @script(name, **{"settings": ("dp2", "tp2"), **options})
    def _(job: Job) -> Results:
        model, batch = job.mlp()
        job.parallel(model, batch)
        optimizer = sgd(model)
        act = (lambda: change(job, model, optimizer)) if between else (lambda: None)
        losses = steps(job, model, batches(2), optimizer, act)
        if not between:
            change(job, model, optimizer)
        losses += steps(job, model, batches(2), optimizer, act)
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model(**job.rows(batch))))
        return {"losses": losses, **job.parameters(model)}


def _alone(name: str, change: Callable[[Any, torch.optim.Optimizer], Any], **options: Any) -> None:
    _enter(f"{name} on rank 0 alone", lambda job, model, it: change(model, it) if job.rank == 0 else None, **options)


def _slow(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.1


def _forget_state(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def _load_state(model: Any, optimizer: torch.optim.Optimizer) -> None:
    kept = optimizer.state_dict()
    for group in kept["param_groups"]:
        group["lr"] = 0.01
    optimizer.load_state_dict(kept)


def _scale(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trained(model):
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def _clip(model: Any, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _weigh(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trained(model):
        parameter.grad.mul_(1.0 + job.rank)  # type: ignore[union-attr]


def _same_noise(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    for parameter in trained(model):
        parameter.grad.add_(torch.randn(parameter.shape, dtype=torch.float64))  # type: ignore[union-attr]


def _noise(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(job.rank)
    for parameter in trained(model):
        parameter.grad.add_(torch.randn(parameter.shape, dtype=torch.float64))  # type: ignore[union-attr]


def _given(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in trained(model):
        parameter.grad = torch.full(parameter.shape, 0.1 * (1 + job.rank), dtype=torch.float64)


RATES, WRITES, OFTEN = "with unlike 'lr'", "written unequally many", "written unequally often"

_alone("lowers the rate", _slow, refused=RATES)
_alone("loads its optimizer's state", _load_state, refused=RATES)
_alone("forgets its optimizer's momentum", _forget_state, refused=WRITES)
_alone("halves gradients", _scale, between=True, refused=WRITES)
_alone("clips gradients by value", _clip, between=True, refused=WRITES)
_alone("sets gradients to zero", lambda model, _: model.zero_grad(set_to_none=False), between=True, refused=WRITES)
_alone("forgets gradients", lambda model, _: model.zero_grad(), between=True, refused=OFTEN)
_alone("forgets one gradient", lambda model, _: setattr(model.last.weight, "grad", None), between=True, refused=OFTEN)
_alone("freezes a layer", lambda model, _: model.middle.requires_grad_(False), refused="change a model on all ranks")
_alone("puts the model into evaluation", lambda model, _: model.eval(), refused="change a model on all ranks")
_alone("changes what the forward reads", lambda model, _: setattr(model, "scale", 0.5), refused="change a model on all")
_enter("scales gradients by a number of its own on each rank", _weigh, between=True, refused="the numbers 1, 2")
_enter("adds noise of its own to gradients on each rank", _noise, between=True, refused="tensors of norms")
_enter("gives gradients of its own on each rank", _given, between=True, refused="with unlike values")
_enter("adds the same noise to gradients on all ranks", _same_noise, between=True)
_enter("halves gradients on all ranks", lambda job, model, it: _scale(model, it), between=True)
_enter("lowers the rate on all ranks", lambda job, model, it: _slow(model, it))
_enter("forgets its optimizer's momentum on all ranks", lambda job, model, it: _forget_state(model, it))


@script("makes an optimizer of another rate on each rank", settings=("dp2", "tp2"), refused=RATES)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    return {"losses": steps(job, model, batches(2), sgd(model, lr=0.1 * (1 + job.rank)))}


@script("lowers the rate by a schedule that steps on rank 0 alone", settings=("dp2", "tp2"), refused=RATES)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for one in batches(3):
        losses += steps(job, model, [one], optimizer)
        if job.rank == 0:
            schedule.step()
    return {"losses": losses, **job.parameters(model)}


@script("averages the model on rank 0 alone", settings=SEVERAL, refused=WRITES)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    for one in batches(3):
        steps(job, model, [one], optimizer)
        if job.rank == 0:
            averaged.update_parameters(model)
    return job.parameters(model)


@script("keeps an average by hand on rank 0 alone", settings=SEVERAL, refused=WRITES)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    average: dict[str, Tensor] = {}
    if job.rank == 0:
        average = {name: value.clone() for name, value in model.state_dict().items()}
    for one in batches(3):
        steps(job, model, [one], optimizer)
        if job.rank == 0:
            for name, value in model.state_dict().items():
                average[name].mul_(0.5).add_(value, alpha=0.5)
    return job.parameters(model)


def _statistics(name: str, write: Callable[[Any], Any], alone: bool = True) -> None:
    where, refused = ("rank 0 alone", OFTEN) if alone else ("all ranks", "")

    @script(f"{name} on {where}", settings=SEVERAL, refused=refused)
    def _(job: Job) -> Results:
        model, batch = job.conv()
        job.parallel(model, batch)
        losses = steps(job, model, [batch] * 2, sgd(model))
        if job.rank == 0 or not alone:
            write(model)
        model.eval()
        with torch.no_grad():
            losses.append(float(loss_of(model(**job.rows(batch)))))
        model.train()
        losses.append(float(loss_of(model(**job.rows(batch))).detach()))
        return {"losses": losses, **job.buffers(model)}


def _norm(model: nn.Module) -> Any:
    return next(one for one in model.modules() if isinstance(one, nn.BatchNorm2d))


for _alone_or_all in (True, False):
    _statistics("resets a batch norm's statistics", lambda model: _norm(model).reset_running_stats(), _alone_or_all)
    _statistics("writes a batch norm's mean", lambda model: _norm(model).running_mean.fill_(0.5), _alone_or_all)


@script("writes a batch norm's mean unlike on each rank", settings=("dp2", "tp2"), refused="written with unlike values")
def _(job: Job) -> Results:
    model, batch = job.conv()
    job.parallel(model, batch)
    _norm(model).running_mean.fill_(0.1 * (1 + job.rank))
    return {"losses": steps(job, model, [batch], sgd(model))}
