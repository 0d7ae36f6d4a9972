"""What one rank does alone, as its log wants it: it looks at parameters, saves, evaluates. The others go on."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx import HetuFxError
from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.settings import SEVERAL

Look = Callable[[nn.Module, Batch], Any]


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
    told = job.everyones(seen)[job.world - 1]
    found = {f"look {turn}: {name}": value for turn, seen in enumerate(told) for name, value in seen.items()}
    return {"loss": loss, **job.parameters(model), **found}


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
