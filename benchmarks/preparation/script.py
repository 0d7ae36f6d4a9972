"""A script as small repositories have it: a character model of 4 blocks, trained on text of the standard library.

It imports what such a script imports, and marks the moments at which its parts end.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable
from typing import Any

from benchmarks.kit.smallest import least

BEGUN = time.perf_counter(), time.process_time()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

WIDTH, HEADS, BLOCKS, LENGTH, ROWS = 64, 4, 4, 64, 8
STEPS, WARM_UP = 40, 10
DDP, OURS = "DDP", "hetu_fx"

Marks = dict[str, tuple[float, float]]
"""Wall and processor seconds of each part."""


class Block(nn.Module):
    """Attention and a feed-forward part, as nanoGPT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.attention(self.ln_1(x)).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.projection(mixed)
        return x + self.narrow(F.gelu(self.wide(self.ln_2(x))))


class CharacterModel(nn.Module):
    """Returns logits and loss, in nanoGPT's order."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def train(who: str) -> Marks:
    """Train some steps as one process of two; give what each part has taken here."""
    marks, mark = _marking()
    mark("import torch")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    text = _text()
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(character) for character in text])
    torch.manual_seed(0)
    model: Any = CharacterModel(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(ids) - LENGTH - 1, (ROWS,), generator=draw).tolist()
        return torch.stack([ids[i : i + LENGTH] for i in starts]), torch.stack([ids[i + 1 :][:LENGTH] for i in starts])

    def step() -> None:
        optimizer.zero_grad()
        model(*batch())[1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    mark("data and model")
    if who == OURS:
        import hetu_fx

        mark_import = hetu_fx.auto_parallelize
        mark("import hetu_fx")
        model = mark_import(model, batch(), optimizer=optimizer)
    else:
        mark("import hetu_fx")
        model = nn.parallel.DistributedDataParallel(model)
    mark("make it parallel")
    for name, count in (("first step", 1), ("warm-up", WARM_UP), ("steps", STEPS - WARM_UP - 1)):
        for _ in range(least(count, 2)):
            step()
        mark(name)
    if who == OURS:
        marks |= {f"  {what}": (seconds, 0.0) for what, seconds in model.hetu.stats["prepared"].items()}
    torch.distributed.destroy_process_group()
    return marks


def _text() -> str:
    """Return the source of a module of the standard library."""
    with open(types.__file__) as file:
        return file.read()


def _marking() -> tuple[Marks, Callable[[str], None]]:
    """Return what is filled, and what marks the end of a part."""
    marks, before = Marks(), list(BEGUN)

    def mark(name: str) -> None:
        now = time.perf_counter(), time.process_time()
        marks[name] = now[0] - before[0], now[1] - before[1]
        before[:] = now

    assert int(os.environ["WORLD_SIZE"]) > 1, "it is one process of several"
    return marks, mark
