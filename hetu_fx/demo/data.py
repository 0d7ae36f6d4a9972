"""The text that the demo trains on: the sources of Python's standard library, as bytes.

A sequence is a piece of a file (what stands between empty lines), from its beginning. Pieces have
a long tail of lengths: short ones are padded, so ranks bring unequal numbers of tokens.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetu_fx.demo.settings import DemoSettings
from hetu_fx.errors import EnvironmentProblem

START, PAD = 256, 257
VOCABULARY = 258
IGNORED = -100
NUM_FILES = 150

Batch = dict[str, Tensor]


def library_pieces(num_files: int = NUM_FILES, folder: str | None = None) -> tuple[bytes, ...]:
    """Return the pieces of some of the library's files, the same ones in every process."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py") if path.is_file())
    files += sorted(path for path in root.glob("[a-z]*/*.py") if "site-packages" not in path.parts)
    chosen = sorted(random.Random(0).sample(files, min(num_files, len(files))))
    pieces = (piece.strip(b"\n") for path in chosen for piece in path.read_bytes().split(b"\n\n"))
    found = tuple(piece for piece in pieces if piece)
    if not found:
        raise EnvironmentProblem(f"no Python sources in {root} to train on; is the standard library zipped?")
    return found


class Text:
    """Makes the batch of every step: a pure function of settings and step."""

    def __init__(self, settings: DemoSettings, pieces: Sequence[bytes]) -> None:
        self.settings, self.pieces = settings, tuple(pieces)
        self.long_pieces = tuple(piece for piece in self.pieces if len(piece) >= settings.long_length)
        if not self.long_pieces:
            raise EnvironmentProblem(f"no piece of the text has {settings.long_length} bytes")

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: input_ids and labels [rows, length]."""
        rows, length = self.settings.shape(step)
        choose = random.Random(self.settings.seed * 100_003 + step)
        pieces = self.long_pieces if step in self.settings.long_at else self.pieces
        return stacked([choose.choice(pieces) for _ in range(rows)], length)

    def held_out(self) -> Batch:
        """Return a usual batch that no step has."""
        return self.batch(self.settings.steps)


def stacked(pieces: Sequence[bytes], length: int) -> Batch:
    """Return sequences cut or padded to `length`; padding has the label that the loss ignores."""
    rows = [[START, *piece[: length - 1]] for piece in pieces]
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == PAD, IGNORED)}


def own_rows(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return the rows that a rank brings: an even share, as a distributed sampler gives it."""
    return {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}


def num_tokens(batch: Batch) -> int:
    """Return the number of tokens that are predicted (the first of a row and padding are not)."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
