"""The plans in which wrong moves are planted, in worlds of 2 to 64 ranks, and the model that they train.

Every number that the model computes has a part in its loss: every token is in the batch and has a label, nothing is
masked, clipped or zero. So a wrong number that is moved anywhere changes the loss or a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hetu_fx.plans.plan import Pipeline, Plan, Stage

VOCABULARY, TOKENS, WIDTH, HEADS = 16, 8, 16, 4


class Block(nn.Module):
    """Attention, which sees all tokens unless there is a mask, and two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.before(x)
        made = (each(normed) for each in (self.query, self.key, self.value))
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in made]
        attended = nn.functional.scaled_dot_product_attention(*heads, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Net(nn.Module):
    """A few blocks between an embedding and a head, and the loss of every token."""

    def __init__(self, blocks: int, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches_of(rows: int, steps: int = 2) -> list[dict[str, Tensor]]:
    """Make batches; every row has half of all tokens, and every two rows all of them."""
    generator = torch.Generator().manual_seed(6)
    shuffled = [torch.randperm(VOCABULARY, generator=generator).view(2, TOKENS) for _ in range(steps * rows)]
    whole = [torch.cat(shuffled[step * rows : (step + 1) * rows])[:rows] for step in range(steps)]
    return [{"ids": ids, "labels": ids.roll(3, 1).flip(0)} for ids in whole]


@dataclass(frozen=True)
class World:
    """A plan of so many ranks, and the blocks of the model that it trains; a step has `rows` sequences."""

    ranks: int
    plan: Plan
    blocks: int
    rows: int

    def model(self) -> nn.Module:
        """Make the model, always with the same numbers."""
        torch.manual_seed(5)
        return Net(self.blocks).double()

    def batches(self) -> list[dict[str, Tensor]]:
        """Make the batches of two steps."""
        return batches_of(self.rows)


def _stages(*degrees: int, first: int = 0) -> tuple[Stage, ...]:
    starts = [first + sum(degrees[:place]) for place in range(len(degrees))]
    return tuple(Stage(tuple(range(s, s + degree))) for s, degree in zip(starts, degrees, strict=True))


def _pipelines(*shapes: tuple[int, ...], rows: tuple[int, ...] = ()) -> tuple[Pipeline, ...]:
    starts = [sum(map(sum, shapes[:place])) for place in range(len(shapes))]
    each = zip(starts, shapes, rows or (1,) * len(shapes), strict=True)
    return tuple(
        Pipeline(_stages(*s, first=start), share=share, micro_batches=min(2, share + 1)) for start, s, share in each
    )


_GRID = Pipeline((Stage((0, 1, 2, 3), (3, 1), context=2), Stage((4,))), share=3, micro_batches=2)

WORLDS: Mapping[str, World] = {
    "a group cut 3:1": World(2, Plan((Pipeline((Stage((0, 1), (3, 1)),)),)), 1, 2),
    "two replicas": World(2, Plan.data_parallel((0, 1), (2, 1)), 1, 3),
    "a group before a device": World(3, Plan(_pipelines((2, 1))), 2, 2),
    "a group before a device, beside a device": World(4, Plan(_pipelines((2, 1), (1,), rows=(3, 1))), 2, 4),
    "a grid before a device, beside a device": World(6, Plan((_GRID, Pipeline((Stage((5,)),)))), 2, 4),
    "two pipelines that share the sequence": World(
        8, replace(Plan(_pipelines((2, 2), (2, 2))), sequence_parallel=True), 2, 4
    ),
    "replicas with whole states": World(8, replace(Plan(_pipelines((4,), (2,), (1,), (1,))), zero=0), 1, 4),
    "three unlike pipelines": World(16, Plan(_pipelines((4, 4), (4, 2), (1, 1), rows=(3, 2, 1))), 2, 6),
    "four pipelines of four stages": World(64, Plan(_pipelines(*((4, 4, 4, 4),) * 4)), 4, 8),
}  # fmt: skip
