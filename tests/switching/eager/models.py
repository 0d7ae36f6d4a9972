"""Modules that torch.export refuses, and batches for them; rows do not meet in them, so that plans cannot matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH = 6


class Choosy(nn.Module):
    """Treats every row as its values say: how many layers it goes through, and whether `rare` is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.double()

    def predict(self, x: Tensor, depth: Tensor) -> Tensor:
        rows = []
        for row, steps in zip(x, depth, strict=True):
            hidden = self.first(row)
            for _ in range(int(steps)):
                hidden = torch.tanh(self.body(hidden))
            if steps > 2:
                hidden = self.rare(hidden)
            rows.append(self.last(hidden))
        return torch.stack(rows)

    def forward(self, x: Tensor, depth: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = self.predict(x, depth)
        return {"loss": ((out - target) ** 2).mean(), "out": out}


class Predicts(Choosy):
    """Returns no loss."""

    def forward(self, x: Tensor, depth: Tensor, target: Tensor | None = None) -> Tensor:
        return self.predict(x, depth)


class Told(Choosy):
    """Returns a scalar and a plain number of its own rows besides the loss."""

    def forward(self, x: Tensor, depth: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
        out = self.predict(x, depth)
        return ((out - target) ** 2).mean(), out.abs().max(), len(out)


class Fails(Choosy):
    """Raises when it sees a negative depth."""

    def forward(self, x: Tensor, depth: Tensor, target: Tensor) -> dict[str, Tensor]:
        if (depth < 0).any():
            raise ValueError("a negative depth")
        return super().forward(x, depth, target)


class Normed(nn.Module):
    """Keeps running statistics, and asks a tensor for its value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale = 2.0 if float(x.detach().abs().max()) > 0 else 1.0
        out = scale * self.norm(x)
        return {"loss": (out**2).mean(), "out": out}


class Meets(nn.Module):
    """Works out everything from all rows: statistics, pairs, a branch on a sum; drops, and returns what has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor | int]:
        out = self.last(self.drop(self.norm(x)))
        pairs = cross_entropy(out @ x.T, torch.arange(len(x)))
        loss = pairs if float(x.detach().sum()) > 0 else 2 * pairs
        return {"loss": loss, "out": out, "most": out.abs().amax(), "rows": len(x)}


def meeting(rows: int, seed: int) -> dict[str, Tensor]:
    """Make a batch for it."""
    return {"x": batch(rows, seed)["x"]}


def squared_error(output: Tensor, x: Tensor, depth: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def batch(rows: int, seed: int, deepest: int = 3) -> dict[str, Tensor]:
    """Make a batch; depth 3 needs the layer that is rarely used."""
    torch.manual_seed(100 + seed)
    x, target = torch.randn(2, rows, WIDTH, dtype=torch.float64)
    return {"x": x, "depth": torch.randint(1, deepest + 1, (rows,)), "target": target}
