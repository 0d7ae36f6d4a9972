"""What the demo's result is held against: the same training on one process, and the checkpoint read back."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hetu_fx.demo.data import Text, library_pieces, num_tokens
from hetu_fx.demo.model import digest, loss_of, make_model, make_optimizer, train_step
from hetu_fx.demo.report import Loaded, Reference
from hetu_fx.demo.screen import Screen, Shown
from hetu_fx.demo.settings import DemoSettings


def train_alone(settings: DemoSettings, screen: Screen) -> Reference:
    """Train the same model on the same global batches in this process."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    text, model = Text(settings, library_pieces()), make_model(settings)
    optimizer = make_optimizer(model, settings)
    losses, begin = [], time.perf_counter()
    for step in range(settings.steps):
        batch, start = text.batch(step), time.perf_counter()
        losses.append(train_step(model, optimizer, batch))
        rate = num_tokens(batch) / (time.perf_counter() - start)
        screen.step(Shown(step, settings.steps, losses[-1], rate, "one process"))
    screen.finish()
    return Reference(tuple(losses), time.perf_counter() - begin, torch.get_num_threads())


def load_checkpoint(folder: Path, weights: str, settings: DemoSettings) -> Loaded:
    """Read the checkpoint as any transformers user would, and compare with what the ranks had.

    weights: the hash of their parameters.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder)
    same = digest(dict(model.named_parameters())) == weights
    return Loaded(same, loss_of(model, Text(settings, library_pieces()).held_out()))
