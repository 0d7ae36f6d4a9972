"""What one rank does alone, as its log wants it: it looks at parameters, saves, evaluates. The others go on."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hetu_fx import HetuFxError
from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL, USUAL

Look = Callable[[nn.Module, Batch], Any]
EVERY = (*USUAL, "pp2")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(**rows))
    loss.backward()
    optimizer.step()
    return loss.detach()


def _after_a_step(job: Job, look: Look, made: str = "mlp") -> Results:
    """Look at the model on one rank alone after each step."""
    model, batch = getattr(job, made)()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows, seen = job.rows(batch), []
    for turn in range(3):
        loss = _step(model, optimizer, rows)
        if job.rank == job.world - 1 and turn < 2:
            seen.append(look(model, batch))  # of the whole batch: what it sees does not depend on which rank looks
    return {"loss": loss, **job.parameters(model), **_told_by(job, seen, job.world - 1)}


def _at_a_barrier(job: Job, look: Look, made: str = "mlp", *, of_gradients: bool = False) -> Results:
    """Look on the first rank alone, in each step or after it, while the others wait for it at a barrier."""
    model, batch = getattr(job, made)()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows, seen = job.rows(batch), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(**rows))
        loss.backward()
        if not of_gradients:
            optimizer.step()
        if job.rank == 0:
            seen.append(look(model, batch))
        job.barrier()
        if of_gradients:
            optimizer.step()
    return {"loss": loss.detach(), **job.parameters(model), **_told_by(job, seen, 0)}


def _told_by(job: Job, seen: list[Any], rank: int) -> Results:
    told = job.everyones(seen)[rank]
    return {f"look {turn}: {name}": value for turn, seen in enumerate(told) for name, value in seen.items()}


def _at_gradients(job: Job, look: Look, *, first: bool = True, clips: bool = False, backwards: int = 1) -> Results:
    """Look at gradients on one rank alone, the first or the last, after the backwards of a step; then all may clip."""
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows, seen, looker = job.rows(batch), [], 0 if first else job.world - 1
    for turn in range(3):
        for _ in range(backwards):
            loss = loss_of(model(**rows))
            loss.backward()
        if job.rank == looker and turn < 2:
            seen.append(look(model, batch))
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if job.rank == looker and turn < 2:
            seen.append(look(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach(), **job.parameters(model), **_told_by(job, seen, looker)}


def _gradient_numbers(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {"total norm": torch.nn.utils.get_total_norm(gradients.values()).item()}
    found["sum of squares"] = sum(gradient.norm().item() ** 2 for gradient in gradients.values()) ** 0.5
    for name, gradient in gradients.items():
        found |= {
            f"{name} norm": gradient.norm().item(),
            f"{name} data norm": float(gradient.data.norm(2)),
            f"{name} largest": gradient.abs().max().item(),
            f"{name} mean size": gradient.detach().abs().mean().item(),
            f"{name} square": (gradient**2).sum().item(),
            f"{name} is finite": bool(torch.isfinite(gradient).all()),
        }
    return found


def _gradient_arrays(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: torch.from_numpy(gradient.detach().cpu().numpy().copy()) for name, gradient in found.items()}


def _numbers(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found |= {
            f"{name} norm": p.norm().item(),
            f"{name} mean": float(p.detach().mean()),
            f"{name} deviation": p.std().item(),
            f"{name} largest": p.detach().abs().max().item(),
            f"{name} square": (p.data**2).sum().sqrt().item(),
            f"{name} single": p.detach().float().norm().item(),
            f"{name} is finite": bool(torch.isfinite(p).all()),
            f"{name} first": p.reshape(-1)[0].item(),
        }
    return found


def _arrays(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Look as histograms of TensorBoard do: make_np calls detach, cpu and numpy."""
    arrays = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    return {name: torch.histc(torch.from_numpy(array.copy()), 5) for name, array in arrays.items()}


def _saved(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return dict(torch.load(buffer))


@torch.no_grad()
def _evaluated(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    model.eval()
    made = [model(**batch) for _ in range(2)]
    model.train()
    return {"loss": loss_of(made[1]), "logits": made[1]["logits"]}


@torch.no_grad()
def _generated(model: Any, batch: Batch) -> Mapping[str, Any]:
    model.eval()
    ids = model.generate(batch["input_ids"][:1, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()
    return {"ids": ids}


for _what, _look, _made, _tolerance in (
    ("logs numbers of parameters", _numbers, "mlp", 1e-6),  # some in single precision
    ("makes histograms of parameters", _arrays, "mlp", 1e-9),
    ("saves by torch.save", _saved, "mlp", 1e-9),
    ("evaluates", _evaluated, "mlp", 1e-9),
    ("generates", _generated, "llama", 1e-5),
):
    script(f"{_what} on one rank alone, while the others train", settings=SEVERAL, tolerance=_tolerance)(
        lambda job, look=_look, made=_made: _after_a_step(job, look, made)
    )


for _what, _look, _made, _tolerance, _of_gradients in (
    ("logs numbers of parameters", _numbers, "mlp", 1e-6, False),
    ("logs numbers of gradients", _gradient_numbers, "mlp", 1e-9, True),
    ("makes histograms of gradients", _gradient_arrays, "mlp", 1e-9, True),
    ("saves by torch.save", _saved, "mlp", 1e-9, False),
    ("evaluates", _evaluated, "mlp", 1e-9, False),
    ("generates", _generated, "llama", 1e-5, False),
):
    script(f"{_what} on rank 0, while the others wait at a barrier", settings=EVERY, tolerance=_tolerance)(
        lambda job, look=_look, made=_made, of=_of_gradients: _at_a_barrier(job, look, made, of_gradients=of)
    )

for _what, _how in {
    "logs numbers of gradients on rank 0, while the others step and clear them": {},
    "logs numbers of gradients on the last rank, while the others go on to clip them": {"first": False, "clips": True},
    "logs numbers of summed gradients on rank 0, while the others go on": {"backwards": 2},
}.items():
    script(_what, settings=EVERY)(lambda job, how=_how: _at_gradients(job, _gradient_numbers, **how))


@script("evaluates on rank 0, while the others wait for accelerate, then on all ranks", settings=EVERY)
def _(job: Job) -> Results:
    accelerator = Accelerator(cpu=True)
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows, seen, losses = job.rows(batch), [], []
    for _ in range(2):
        _step(model, optimizer, rows)
        for _ in range(3):
            if accelerator.is_main_process:
                seen.append(_evaluated(model, batch))
            accelerator.wait_for_everyone()
        with torch.no_grad():
            losses.append(loss_of(model(**rows)))
    return {"losses": torch.stack(losses), **job.parameters(model), **_told_by(job, seen, 0)}


@script("evaluates with an unknown argument on rank 0, while the others wait at a barrier or train", settings=EVERY)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = job.rows(batch)
    for turn in range(3):
        loss = _step(model, optimizer, rows)
        if job.rank == 0 and turn < 2:
            with torch.no_grad(), pytest.raises((TypeError, HetuFxError), match="unknown"):
                model(**batch, unknown=1)
        if turn == 0:
            job.barrier()
    return {"loss": loss, **job.parameters(model)}


@script(
    "reads gradients on rank 0 when the others have set them to zero, and continues", settings=("dp2", "tp2", "pp2")
)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = job.rows(batch)
    loss_of(model(**rows)).backward()
    if job.rank == 1:
        optimizer.zero_grad(set_to_none=False)
    job.barrier()
    if job.rank == 0:
        if not job.is_plain:
            with pytest.raises(HetuFxError, match=r"the gradient of .* this rank has gone on"):
                torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad(set_to_none=False)
    return {"loss": _step(model, optimizer, rows), **job.parameters(model)}


@script("takes a norm on one rank while the others take a sum", settings=SEVERAL)
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = job.rows(batch)
    _step(model, optimizer, rows)
    weight = model.last.weight.detach()
    seen = job.everyones(float(weight.norm() if job.rank == 0 else weight.sum()))
    return {"norm": seen[0], "loss": _step(model, optimizer, rows), **job.parameters(model)}


@script("reads a parameter on one rank alone when the others have stepped, and continues", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model = job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = job.rows(batch)
    optimizer.zero_grad()
    loss_of(model(**rows)).backward()
    if job.rank == 1:
        optimizer.step()
    job.barrier()
    if job.rank == 0:
        if not job.is_plain:
            with pytest.raises(HetuFxError, match="this rank has gone on"):
                model.last.weight.norm().item()
        optimizer.step()
    return {"loss": _step(model, optimizer, rows), **job.parameters(model)}
