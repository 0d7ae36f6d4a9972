"""A small net with an op of each class, and ways that are wrong in one op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hetu_fx_align.way import Way

Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.words(x)
        hidden = hidden + self.drop(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))
        return nn.functional.cross_entropy((hidden @ self.words.weight.T).flatten(0, 1), y.flatten())


def net_and_batch() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = Net()
    return model, {"x": torch.randint(0, 20, (4, 7)), "y": torch.randint(0, 20, (4, 7))}


def wrong(op: str, fault: Callable[[Tensor], Tensor]) -> Way:
    """Return a way in which the result of one op has a fault."""
    return Way("wrong", replaced={op: lambda call, *args, **kwargs: fault(call(*args, **kwargs))})
