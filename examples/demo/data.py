"""What the demo trains, and on what: ordinary transformers and torch, and the sources of Python's standard library.

The text is taken as bytes. A sequence is a piece of a file (what stands between empty lines), from its beginning.
Pieces have a long tail of lengths: short ones are padded, so ranks bring unequal numbers of tokens.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.demo.settings import DemoSettings
from hetu_fx.batches.packing import IGNORED
from hetu_fx.errors import EnvironmentProblem

START, PAD = 256, 257
VOCABULARY = 258
NUM_FILES = 150

Batch = dict[str, Tensor]
Clock = Callable[[str, float, float], None]


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


def make_model(settings: DemoSettings) -> nn.Module:
    """Make the model, with the same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        max_position_embeddings=settings.long_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def make_optimizer(model: nn.Module, settings: DemoSettings) -> torch.optim.Optimizer:
    """Make the optimizer that every contestant uses."""
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clock: Clock | None = None) -> float:
    """Do one step of the ordinary loop; return the loss. `clock` is told what took from when to when."""
    times = [time.perf_counter()]
    loss: Tensor = model(**batch).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    if clock is not None:
        for kind, start, end in zip(("forward", "backward", "optimizer"), times, times[1:], strict=False):
            clock(kind, start, end)
    return loss.item()


def loss_of(model: nn.Module, batch: Batch) -> float:
    """Return the loss of a batch, without training on it."""
    with torch.no_grad():
        return float(model(**batch).loss.item())


def num_parameters(model: nn.Module) -> int:
    """Count the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names and exact values, to tell whether two processes have the same."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().contiguous().numpy().tobytes())
    return total.hexdigest()
