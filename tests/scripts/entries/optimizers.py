"""Optimizers and schedules, of torch and written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, steps, trained


def _trains_with(name: str, make: Callable[[Any], torch.optim.Optimizer], tolerance: float = 1e-9) -> None:
    @script(f"trains with {name}", tolerance=tolerance)
    def _(job: Job) -> Results:
        model, batch = job.mlp()
        job.parallel(model, batch)
        losses = steps(job, model, batches(3), make(trained(model)))
        return {"losses": losses, **job.parameters(model)}


_trains_with("SGD with Nesterov's momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
_trains_with("AdamW", lambda p: torch.optim.AdamW(p, lr=0.01))
_trains_with("fused AdamW", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
_trains_with("AdamW without foreach", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False))
_trains_with("Adam with amsgrad", lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True))
_trains_with("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.05))
_trains_with("RMSprop", lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True))
_trains_with("Adadelta", lambda p: torch.optim.Adadelta(p, lr=0.5))
_trains_with("NAdam", lambda p: torch.optim.NAdam(p, lr=0.01))
_trains_with("RAdam", lambda p: torch.optim.RAdam(p, lr=0.01))
_trains_with("Rprop", lambda p: torch.optim.Rprop(p, lr=0.01))
_trains_with("Adafactor", lambda p: torch.optim.Adafactor(p, lr=0.01), tolerance=1e-6)


class _Lion(torch.optim.Optimizer):
    """An optimizer as people write their own: state made at the first step, updates in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                update = average.mul(0.9).add(parameter.grad, alpha=0.1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                average.lerp_(parameter.grad, 0.01)


_trains_with("an optimizer of its own", lambda p: _Lion(p, lr=0.01))


@script("trains with LBFGS, which calls the model in a closure")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = torch.optim.LBFGS(trained(model), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(**job.rows(batch)))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(2)]
    return {"losses": losses, **job.parameters(model)}


@script("has groups of parameters with rates and decay of their own")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    weights = [p for p in trained(model) if p.dim() > 1]
    biases = [p for p in trained(model) if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
    )
    losses = steps(job, model, batches(3), optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("adds a group of parameters in the middle of training")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=0.01)
    first, *rest = batches(3)
    steps(job, model, [first], optimizer)
    optimizer.add_param_group({"params": list(model.middle.parameters()), "lr": 0.02})
    losses = steps(job, model, rest, optimizer)
    return {"losses": losses, **job.parameters(model)}


@script("has one optimizer for each half of the model")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    one = torch.optim.SGD([model.first.weight, *model.middle.parameters()], lr=0.1)
    other = torch.optim.AdamW(model.last.parameters(), lr=0.01)
    for batch in batches(3):
        loss_of(model(**job.rows(batch))).backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    return job.parameters(model)


def _schedules_by(name: str, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    @script(f"schedules the rate by {name}")
    def _(job: Job) -> Results:
        model, batch = job.mlp()
        job.parallel(model, batch)
        optimizer = sgd(model)
        schedule = make(optimizer)
        rates = []
        for one in batches(4):
            steps(job, model, [one], optimizer)
            schedule.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return {"rates": rates, **job.parameters(model)}


_schedules_by("OneCycleLR, which changes the momentum too", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=5))
_schedules_by("CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 4))
_schedules_by("LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))


@script("schedules the rate by the loss of an evaluation (ReduceLROnPlateau)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for one in batches(3):
        steps(job, model, [one], optimizer)
        with torch.no_grad():
            schedule.step(float(loss_of(model(**job.rows(batch)))))
    return {"rate": float(optimizer.param_groups[0]["lr"]), **job.parameters(model)}


@script("steps inside backward, a parameter at a time (register_post_accumulate_grad_hook)")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in trained(model)}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in trained(model):
        parameter.register_post_accumulate_grad_hook(update)
    for one in batches(2):
        loss_of(model(**job.rows(one))).backward()
    return job.parameters(model)


@script("reads the optimizer's state after a step")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    steps(job, model, batches(2), optimizer)
    norms = [float(state["exp_avg"].norm()) for state in optimizer.state.values()]
    counts = [float(state["step"]) for state in optimizer.state.values()]
    return {"norms": norms, "counts": counts}
