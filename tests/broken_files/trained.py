"""A tiny parallel model with an optimizer, and what of both a reader must not change before it has read all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.handle import Handle


class Net(nn.Module):
    """Weights of several shapes, tied ones, a half, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.Linear(4, 6)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.down(torch.tanh(self.up(x))))
        return nn.functional.mse_loss(self.again(hidden), y)


class Small(nn.Module):
    """One layer: to export a graph takes a second for each that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.up(x), y)


def plain(value: Any) -> Any:
    """Return a value as JSON values that are equal where all bits are."""
    if isinstance(value, Tensor):
        whole = hetu_fx.full_tensor(value).detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value if isinstance(value, (bool, str, type(None))) else repr(value)


class Trained:
    """A model that has taken a step, so that its optimizer has state."""

    def __init__(self, make: type[nn.Module], plan: hetu_fx.Plan | None = None) -> None:
        torch.manual_seed(3)
        net = make()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)
        plan = plan or replace(hetu_fx.Plan.single(0), name="alone")
        self.model: Any = hetu_fx.auto_parallelize(
            net, self.batch(0), plan=plan, optimizer=self.optimizer, seed=3, check=False
        )
        self.hetu: Handle = self.model.hetu
        self.train(1)

    @staticmethod
    def batch(number: int) -> dict[str, Tensor]:
        """Return a batch, the same for the same number."""
        generator = torch.Generator().manual_seed(number)
        return {name: torch.randn(6, size, generator=generator) for name, size in (("x", 4), ("y", 6))}

    def train(self, steps: int) -> None:
        """Take steps."""
        for number in range(steps):
            self.model(**self.batch(number)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that a checkpoint holds: parameters, buffers and what the optimizer keeps of each."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return (*self.model.parameters(), *self.model.buffers(), *kept)

    def fill(self, number: int) -> None:
        """Make every element of every tensor a number."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(number)

    @property
    def numbers(self) -> set[float]:
        """Return all numbers that are in the tensors."""
        return {float(number) for tensor in self.tensors for number in hetu_fx.full_tensor(tensor.detach()).unique()}

    @property
    def state(self) -> Any:
        """Return all that a reader may put something into."""
        return plain(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "steps": self.hetu.stats["steps"],
                "random": torch.get_rng_state(),
                "gradients": [parameter.grad for parameter in self.model.parameters()],
            }
        )


@cache
def trained(make: type[nn.Module] = Net) -> Trained:
    """Return the one of this process, of a class of models."""
    torch.set_num_threads(1)
    return Trained(make)
