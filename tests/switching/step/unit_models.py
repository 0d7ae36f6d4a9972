"""Models whose parameters are gathered unit by unit in tests, and what tells whether two trainings are the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.lockstep import Trained

WORDS, WIDTH = 24, 8


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Words(nn.Module):
    """Predicts words of each other; its blocks read what the embedding has made a second time, past each other."""

    def __init__(self, blocks: int = 3, *, tied: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(blocks))
        self.mixes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        x = first = self.embedding(words)
        for block in self.blocks:
            x = block(x) + 0.1 * first.sin()
        logits = self.head(self.mixes(x))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Plain(nn.Module):
    """Has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.third = nn.Linear(WIDTH, 160), nn.Linear(160, 160), nn.Linear(160, WIDTH)

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.embedding(words)))))
        return F.cross_entropy((self.third(x) @ self.embedding.weight.t()).flatten(0, 1), wanted.flatten())


class Adapted(nn.Module):
    """A linear layer that stays as it is, with a small one beside it that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, rank = base.requires_grad_(False), 2
        self.down = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def words(*, tied: bool = False, p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Words(tied=tied, p=p).double()


def frozen() -> nn.Module:
    """Freeze what stands before blocks, the first block, and norms and a weight in all."""
    model = words()
    for name, parameter in model.named_parameters():
        frozen = ("embedding", "blocks.0", "norm", "down.weight")
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def adapted() -> nn.Module:
    """Train what is beside one layer of each block, and nothing else."""
    model = words().requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up).double()
    return model


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain().double()


def batch(rows: int = 4, seed: int = 1) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, WORDS, (rows, 5), generator=made) for name in ("words", "wanted")}


def assert_same(found: Trained, expected: Trained) -> None:
    """Check that losses, gradients of all steps and parameters after them are the same, bit for bit."""
    assert [step.loss for step in found.steps] == [step.loss for step in expected.steps]
    for one, other in zip(found.steps, expected.steps, strict=True):
        assert one.gradients.keys() == other.gradients.keys()
        different = [name for name, value in one.gradients.items() if not torch.equal(value, other.gradients[name])]
        assert not different
    assert found.state.keys() == expected.state.keys()
    assert not [name for name, value in found.state.items() if not torch.equal(value, expected.state[name])]
