"""Random small models, as values: what they are made of, their source, and batches for them."""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.random_programs import number_steps, state_steps
from tests.random_programs.losses import LOSSES, PLAIN
from tests.random_programs.losses import MEETING as MEETING_LOSSES
from tests.random_programs.steps import MEETING, STEPS
from tests.random_programs.writer import SIZES, Value, Writer

FILES = (number_steps, state_steps)
"""Whose steps are in the table, besides its own."""

CLASSES = 5
RETURNED: Mapping[str, str] = {
    "loss": "{}",
    "with an output": "{}, h",
    "with several outputs": '{{"loss": {}, "h": h, "best": h.argmax(-1), "mean": h.detach().mean(-1)}}',
}
"""What a forward returns beside its loss."""

HEAD = """import torch
from torch import nn
from torch.nn import functional as F
{imports}
"""
CALLED = "from tests.random_programs.database_step import CalledOp\n"

Drawn = tuple[str, int]
"""A step by name, and the seed of what it draws."""


class Misfit(Exception):
    """Steps that make no model: caught where programs are drawn and shrunk."""


@dataclass(frozen=True)
class Program:
    """A model: steps before repeated blocks, in each of these, and after, and a loss.

    Attributes:
        dims: of the input, after its rows.
        before, block, after: steps.
        blocks: how many blocks there are; 0: none.
        loss: by name.
        rows: of each batch.
        row_dim: which dim of the input counts rows: 1 where time comes first.
        returns: what the forward returns, by name.
        tied: all blocks have the weights of the first one.
    """

    dims: tuple[int, ...]
    before: tuple[Drawn, ...]
    block: tuple[Drawn, ...]
    after: tuple[Drawn, ...]
    blocks: int
    loss: str
    rows: tuple[int, ...]
    row_dim: int = 0
    returns: str = "loss"
    tied: bool = False

    @cached_property
    def source(self) -> str:
        """Return the source; `Misfit` where a step cannot be given what the one before it makes."""
        read = LOSSES[self.loss].replace("self.rates", "")
        inputs = ["x", *(name for name in ("y", "labels", "rates") if name in read)]
        w = Writer()
        if self.row_dim:
            w.done.append(f"x = x.movedim({self.row_dim}, 0)")
        h = _written(w, Value("x", self.dims), self.before)
        parts: list[str] = []
        if self.blocks:
            parts.append(f"{_block(h.dims, self.block)}\n")
            w.made.append(f"self.blocks = nn.ModuleList(Block() for _ in range({self.blocks}))")
            if self.tied:
                w.made += ["for block in self.blocks[1:]:", "    block.back.weight = self.blocks[0].back.weight"]
            w.done += [f"h = {h.name}", "for block in self.blocks:", "    h = block(h)"]
            h = Value("h", h.dims)
        h = _written(w, h, self.after)
        head = w.module(f"nn.Linear({math.prod(h.dims)}, {CLASSES})")
        if "self.rates" in LOSSES[self.loss]:
            w.made.append(f'self.register_buffer("rates", torch.rand({CLASSES}) + 0.5)')
        w.done.append(f"h = {head}({h.name}.flatten(1))")
        parts.append(w.source("Model", ", ".join(inputs), RETURNED[self.returns].format(LOSSES[self.loss])))
        text = "".join(parts)
        return HEAD.format(imports=CALLED if "CalledOp" in text else "") + text

    @property
    def can_be(self) -> bool:
        """Tell whether its steps fit each other."""
        try:
            return bool(self.source)
        except Misfit:
            return False

    def model(self) -> nn.Module:
        """Make the model, in float64 and with the same numbers each time."""
        name = f"<random program {abs(hash(self))}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Any] = {}
        exec(compile(self.source, name, "exec"), space)
        torch.manual_seed(0)
        made: nn.Module = space["Model"]()
        return made.double()

    def batches(self) -> list[dict[str, Tensor]]:
        """Make batches, the same each time."""
        return [self._batch(rows, number) for number, rows in enumerate(self.rows)]

    def _batch(self, rows: int, number: int) -> dict[str, Tensor]:
        torch.manual_seed(number + 1)
        labels = torch.randint(0, CLASSES, (rows,))
        if "ignore_index" in LOSSES[self.loss]:
            labels[1::3] = -100
        given = {
            "x": torch.randn(rows, *self.dims, dtype=torch.float64).movedim(0, self.row_dim),
            "y": torch.randn(rows, CLASSES, dtype=torch.float64),
            "labels": labels,
            "rates": torch.rand(rows, dtype=torch.float64) + 0.5,
        }
        wanted = self.source.split("forward(self, ")[-1].split(")")[0].split(", ")
        return {name: given[name] for name in wanted}

    @property
    def row_dims(self) -> dict[str, int]:
        """Return which dim of each input counts rows, as `auto_parallelize` is told it."""
        return {"x": self.row_dim} if self.row_dim else {}

    def smaller(self) -> Iterator[Program]:
        """Yield programs with less in them."""
        if self.blocks:
            yield replace(self, blocks=0, block=())
        for part in ("before", "block", "after"):
            steps = getattr(self, part)
            for i in range(len(steps)):
                yield replace(self, **{part: steps[:i] + steps[i + 1 :]})
        if self.blocks > 1:
            yield replace(self, blocks=self.blocks - 1)
        if len(self.rows) > 1:
            yield from (replace(self, rows=(rows,)) for rows in self.rows)
        for plainer in ({"loss": "mean"}, {"row_dim": 0}, {"returns": "loss"}, {"tied": False}):
            changed = replace(self, **plainer)  # type: ignore[arg-type]
            if changed != self:
                yield changed


def _written(w: Writer, h: Value, steps: tuple[Drawn, ...]) -> Value:
    for name, seed in steps:
        made = STEPS[name](w, Random(seed), h)
        if made is None or math.prod(made.dims) > 96:
            raise Misfit(name)
        h = made
    return h


def _block(dims: tuple[int, ...], steps: tuple[Drawn, ...]) -> str:
    w = Writer()
    h = _written(w, Value("h", dims), steps)
    w.made.append(f"self.back = nn.Linear({math.prod(h.dims)}, {math.prod(dims)})")
    shape = ", ".join(map(str, dims))
    return w.source("Block", "h", f"h + 0.5 * self.back({h.name}.flatten(1)).view(-1, {shape})")


def draw(r: Random, meets: float) -> Program:
    """Draw a program whose source can be written; rows meet in a step or the loss of so many of them.

    Whether it trains, with numbers that are finite, shows when it is run.
    """
    while True:
        program = _drawn(r, r.random() < meets)
        if program.can_be:
            return program


def _drawn(r: Random, meets: bool) -> Program:
    known = [name for name in STEPS if meets or name not in MEETING]
    known += [name for name in known if name == "called"] * (len(known) // 5)  # which stands for hundreds of ops
    blocks = r.choice((0, 2, 3, 4))

    def steps(most: int) -> tuple[Drawn, ...]:
        return tuple((r.choice(known), r.randrange(1 << 30)) for _ in range(r.randint(0, most)))

    dims = tuple(r.choice(SIZES) for _ in range(r.choice((1, 2, 2, 3))))
    return Program(
        dims=dims,
        before=steps(4),
        block=steps(3) if blocks else (),
        after=steps(4),
        blocks=blocks,
        loss=r.choice(list(MEETING_LOSSES if meets and r.random() < 0.5 else PLAIN)),
        rows=tuple(r.randint(4, 9) for _ in range(r.choice((1, 2)))),
        row_dim=r.randint(1, len(dims)) if r.random() < 0.12 else 0,
        returns=r.choice(("loss", "loss", *RETURNED)),
        tied=blocks > 1 and r.random() < 0.2,
    )
