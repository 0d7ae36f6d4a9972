"""Small models to try plans of, and a checker of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize, relu

from hetu_fx.check.checker import Checker
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.switching.eager.execution import EagerExecution
from hetu_fx.switching.graph_execution import GraphExecution

SHARES = Plan.data_parallel((0, 1), (3, 1))
GROUP = Plan.tensor_parallel((0, 1))
STAGES = Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=3),))


class Block(nn.Module):
    """A residual block, which may drop."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(relu(self.up(x)))
        return x + (dropout(y, self.drop) if self.drop else y)


class Tokens(nn.Module):
    """A table of tokens, some blocks, and a head as wide as the table is long."""

    def __init__(self, blocks: int = 5, tokens: int = 1500) -> None:
        super().__init__()
        self.tokens = tokens
        self.table = nn.Embedding(tokens, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
        self.head = nn.Linear(8, tokens)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).view(-1, self.tokens), labels.flatten())


class Mlp(nn.Module):
    """Two products and a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.second(relu(self.first(x))), labels)


class Contrast(nn.Module):
    """Holds every row against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        left, right = (normalize(self.first(rows), dim=-1) for rows in (x, other))
        return cross_entropy(left @ right.T, torch.arange(len(x)))


def tokens_batch(rows: int = 6, length: int = 24) -> dict[str, Tensor]:
    """Return ids and labels that reach the end of the table."""
    source = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 1500, (rows, length), generator=source) for _ in range(2))
    return {"ids": ids, "labels": labels}


def mlp_batch(rows: int = 6) -> dict[str, Tensor]:
    """Return rows and their labels."""
    source = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 6, generator=source), "labels": torch.randint(0, 4, (rows,), generator=source)}


def graph_of(model: nn.Module, batch: Any) -> GraphExecution:
    """Capture a model."""
    return GraphExecution(Programs(model, None), batch, None)


def checker_of(
    model: nn.Module,
    batch: Any,
    folder: Path,
    *,
    loss_fn: Callable[..., Any] | None = None,
    eager: bool = False,
    world: int = 2,
    seconds: float = 600.0,
) -> Checker:
    """Return what tries plans of a model, whatever the machine is busy with."""
    execution = EagerExecution(model, loss_fn, batch) if eager else graph_of(model, batch)
    return Checker(model, loss_fn, batch, execution, world=world, shared=False, folder=folder, seconds=seconds)
