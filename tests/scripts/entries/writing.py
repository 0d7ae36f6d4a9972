"""What scripts write into parameters after the call: on all ranks alike, on one alone, unlike on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetu_fx.errors import StateError
from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, step, steps

_SEVERAL = ("dp2", "tp2", "dp4", "mix4")


def _values(model: nn.Module, seed: int = 5) -> dict[str, torch.Tensor]:
    """Return a state dict of values that no seed of a rank has a part in."""
    generator = torch.Generator().manual_seed(seed)
    named = model.state_dict().items()
    return {name: torch.randn(value.shape, generator=generator, dtype=torch.float64) for name, value in named}


def _writes(name: str, write: Callable[[Job, Any], Any], **options: Any) -> None:
    """Enter what is written after two steps; two follow, and an evaluation."""

    @script(name, **options)
    def _(job: Job) -> Results:
        model, batch = job.mlp()
        job.parallel(model, batch)
        optimizer = sgd(model)
        losses = steps(job, model, batches(2), optimizer)
        write(job, model)
        losses += steps(job, model, batches(2), optimizer)
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model(**job.rows(batch))))
        return {"losses": losses, **job.parameters(model)}


def _alone(name: str, write: Callable[[Any], Any], rank: int = 0) -> None:
    """Enter what one rank writes alone."""
    _writes(
        f"{name} on rank {rank} alone",
        lambda job, model: write(model) if job.rank == rank else None,
        settings=_SEVERAL if name.startswith("loads") else ("dp2", "tp2"),
        refused="written unequally often",
    )


def _unlike(name: str, write: Callable[[Job, Any], Any]) -> None:
    """Enter what ranks write unlike."""
    _writes(name, write, settings=("dp2", "tp2"), refused="written with unlike values")


def _first(model: Any) -> torch.Tensor:
    return model.first.weight  # type: ignore[no-any-return]


@torch.no_grad()
def _copy(model: Any) -> None:
    _first(model).copy_(torch.ones(_first(model).shape))


def _set_data(model: Any) -> None:
    _first(model).data = torch.ones(_first(model).shape, dtype=torch.float64)


@torch.no_grad()
def _scale(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


_alone("loads a state dict", lambda model: model.load_state_dict(_values(model)))
_alone("loads a submodule's state dict", lambda model: model.first.load_state_dict(_values(model.first)))
_alone("copies into a parameter", _copy)
_alone("copies into a parameter's data", lambda model: _first(model).data.copy_(torch.ones(_first(model).shape)), 1)
_alone("gives a parameter other data", _set_data)
_alone("scales parameters", _scale)
_alone("fills a bias with zeros", lambda model: nn.init.zeros_(model.last.bias), 1)


def _seeded(write: Callable[[Any], Any]) -> Callable[[Job, Any], None]:
    def seeded(job: Job, model: Any) -> None:
        torch.manual_seed(7 + job.rank)
        write(model)

    return seeded


@torch.no_grad()
def _add_noise(model: Any) -> None:
    _first(model).add_(torch.randn(_first(model).shape, dtype=torch.float64) * 0.01)


_unlike("loads another state dict on each rank", lambda job, model: model.load_state_dict(_values(model, job.rank)))
_unlike("starts a layer anew with a seed for each rank", _seeded(lambda model: model.middle.reset_parameters()))
_unlike("draws a weight with a seed for each rank", _seeded(lambda model: nn.init.normal_(model.first.weight)))
_unlike("adds noise of its own on each rank", _seeded(_add_noise))

_writes("loads one state dict on all ranks", lambda job, model: model.load_state_dict(_values(model)))
_writes("copies into a parameter on all ranks", lambda job, model: _copy(model))


def _sent(job: Job, model: Any) -> None:
    told = [_values(model) if job.rank == 0 else None]
    if job.world > 1:
        dist.broadcast_object_list(told)
    model.load_state_dict(told[0])


def _same_seed(write: Callable[[Any], Any]) -> Callable[[Job, Any], None]:
    def seeded(job: Job, model: Any) -> None:
        torch.manual_seed(7)
        write(model)

    return seeded


def _rewind(job: Job, model: Any) -> None:
    kept = copy.deepcopy(model.state_dict())
    _scale(model)
    model.load_state_dict(kept)


_writes("loads on all ranks what rank 0 has sent", _sent)
_writes("draws a weight with one seed", _same_seed(lambda model: nn.init.normal_(model.first.weight)))
_writes("adds the same noise on all ranks", _same_seed(_add_noise))
_writes("goes back to a copy of the state dict", _rewind)


@script("loads on rank 0, is told, and loads on the others")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    values = _values(model)
    if job.rank == 0:
        model.load_state_dict(values)
    if job.world > 1:
        try:
            model(**job.rows(batch))
        except StateError:
            if job.rank:
                model.load_state_dict(values)
        else:
            return {"told": False}
    return {"losses": [step(job, model, batch, sgd(model)) for _ in range(2)], **job.parameters(model)}


@script("steps an optimizer on rank 0 alone", refused="written unequally often", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model(**job.rows(batch))).backward()
        if job.rank == 0:
            optimizer.step()
    return job.parameters(model)


@script("loads on rank 0 alone and evaluates whole", refused="written unequally often", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    if job.rank == 0:
        model.load_state_dict(_values(model))
    with model.hetu.whole(), torch.no_grad():
        return {"loss": loss_of(model(**batch))}


@script("loads on rank 0 alone and saves", refused="written unequally often", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    if job.rank == 0:
        model.load_state_dict(_values(model))
    model.hetu.save(job.folder / "saved")
    return {}


@script("loads on rank 0 alone in a copy", refused="make the same writes on all ranks", settings=("dp2",))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    copied = copy.deepcopy(model)
    if job.rank == 0:
        copied.load_state_dict(_values(copied))
    return {"losses": steps(job, copied, batches(1), sgd(copied))}
