"""The demo's contestants, which train on the same batches: hetu_fx, DDP with even shares, and one process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.demo.data import (
    Batch,
    Text,
    digest,
    library_pieces,
    loss_of,
    make_model,
    make_optimizer,
    num_tokens,
    own_rows,
    train_step,
)
from examples.demo.devices import Devices
from examples.demo.record import StepRecord, Throughput
from examples.demo.report import Loaded, Reference
from examples.demo.screen import Screen
from examples.demo.settings import DemoSettings
from hetu_fx.cli.what_if import diff
from hetu_fx.handle import Handle
from hetu_fx.plans.prediction import Prediction
from hetu_fx.report.summary import rates_text
from hetu_fx.show.timeline import Event


class Training:
    """Trains for the settings' steps by hetu_fx, tells what happens, and records it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, devices: Devices, screen: Screen
    ) -> None:
        self.model, self.optimizer, self.text = model, optimizer, text
        self.devices, self.screen = devices, screen
        self.settings, self.hetu = text.settings, cast(Handle, model.hetu)
        self.records: list[StepRecord] = []
        self.events: list[Event] = []
        self.slowed = ""

    def run(self) -> None:
        """Train."""
        self.hetu.on_communication(self._add_communication)
        for step in range(self.settings.steps):
            if step == self.settings.slow_at:
                self.slowed = self.devices.slow()
                self.screen.event(f"step {step + 1}: {self.slowed}; hetu_fx is not told")
            self._step(step)
        self.hetu.on_communication(None)
        self.screen.finish()

    def _add_communication(self, what: str, start: float, end: float) -> None:
        name = f"step {len(self.records) + 1}: {what}"
        kind = what if what == "group creation" else "communication"
        self.events.append(Event(dist.get_rank(), name, start, end, kind))

    def _step(self, step: int) -> None:
        before = self.hetu.current, dict(self.hetu.health), set(self.hetu.variants)
        whole = self.text.batch(step)
        batch = rows_of_this_rank(whole)

        def clock(kind: str, start: float, end: float) -> None:
            self.events.append(Event(dist.get_rank(), f"step {step + 1}: {kind}", start, end, kind))

        start = time.perf_counter()
        loss = train_step(self.model, self.optimizer, batch, clock)
        record = StepRecord(
            step=step,
            loss=loss,
            seconds=time.perf_counter() - start,
            tokens=num_tokens(whole),
            longest=whole["input_ids"].shape[1],
            variant=self.hetu.current,
            rates=dict(self.hetu.health),
        )
        self.records.append(record)
        self._tell(record, *before)

    def _tell(self, record: StepRecord, variant: str, health: Mapping[int, float], known: set[str]) -> None:
        number = record.step + 1
        if _slow(record.rates) != _slow(health):
            self.screen.event(f"step {number}: {health_text(record.rates)}")
        for name in sorted(set(self.hetu.variants) - known):
            plan = self.hetu.variants[name]
            self.screen.event(f"step {number}: planned again, without a restart: {name!r}")
            self.screen.say(diff(self.hetu.variants[variant], plan))
            if plan.predicted is not None:
                self.screen.say(_in_short(plan.predicted))
        if record.variant != variant:
            why = f"longest sequence {record.longest}"
            self.screen.event(f"step {number}: {variant!r} -> {record.variant!r} ({why})")
        self.screen.step(number, self.settings.steps, record.loss, record.tokens_per_second, record.variant)


def rows_of_this_rank(batch: Batch) -> Batch:
    """Return the rows of a global batch that this rank brings."""
    return own_rows(batch, dist.get_rank(), dist.get_world_size())


def _in_short(prediction: Prediction) -> str:
    """Say what a new plan is expected to cost, and why it was chosen."""
    runner_up = f"; runner-up {prediction.runner_up}" if prediction.runner_up else ""
    return f"  predicted step: {prediction.seconds:.2f} s, {prediction.why}{runner_up}"


def health_text(rates: Mapping[int, float]) -> str:
    """Say what is known of the devices' health."""
    return f"noticed: {rates_text(_slow(rates))}"


def _slow(rates: Mapping[int, float]) -> dict[int, float]:
    return {rank: rate for rank, rate in rates.items() if rate != 1.0}


def even_shares(text: Text, devices: Devices, screen: Screen) -> dict[str, Throughput]:
    """Measure DDP with even shares of the same batches: with the slowed device, and as it was at first."""
    model = DistributedDataParallel(make_model(text.settings))
    optimizer = make_optimizer(model, text.settings)
    usual = [step for step in range(text.settings.steps) if step not in text.settings.long_at]
    measured = {"slowed": _measure(model, optimizer, text, usual)}
    devices.heal()
    measured["healthy"] = _measure(model, optimizer, text, usual)
    for state, found in measured.items():
        screen.say(f"DDP, devices {state}: {found.tokens_per_second:.0f} tokens/s")
    return measured


def _measure(model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, usual: list[int]) -> Throughput:
    tokens, seconds = [], []
    for step in usual[: text.settings.compared_steps + 1]:
        whole = text.batch(step)
        batch = rows_of_this_rank(whole)
        dist.barrier()
        start = time.perf_counter()
        train_step(model, optimizer, batch)
        dist.barrier()
        tokens.append(num_tokens(whole))
        seconds.append(time.perf_counter() - start)
    return Throughput(tuple(tokens[1:]), tuple(seconds[1:]))  # the first one warms up


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
        screen.step(step + 1, settings.steps, losses[-1], rate, "one process")
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
