"""One process of the demo: `python -m hetu_fx.demo.rank`, started by `hetu-fx demo` under the emulator."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.demo.data import Batch, Text, library_pieces, num_tokens, own_rows
from hetu_fx.demo.devices import Devices, devices_for
from hetu_fx.demo.model import digest, loss_of, make_model, make_optimizer, num_parameters, train_step
from hetu_fx.demo.plans import Wanted, plan_variants
from hetu_fx.demo.record import RunRecord, StepRecord, Throughput
from hetu_fx.demo.screen import Screen, Shown, make_screen
from hetu_fx.demo.settings import DemoSettings, settings_for
from hetu_fx.handle import Handle
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.simulate.timeline import Event, Timeline
from hetu_fx.plans.explain import diff
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import Prediction
from hetu_fx.report.sinks import rates_text

WAIT = timedelta(seconds=120)


class Training:
    """Trains for the settings' steps, tells what happens, and records it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, devices: Devices, screen: Screen
    ) -> None:
        self.model, self.optimizer, self.text = model, optimizer, text
        self.devices, self.screen = devices, screen
        self.settings = text.settings
        self.records: list[StepRecord] = []
        self.events: list[Event] = []
        self.slowed = ""

    @property
    def hetu(self) -> Handle:
        """Return the parallel model's handle."""
        return _handle_of(self.model)

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
        batch = own_rows(whole, dist.get_rank(), dist.get_world_size())

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
        rate, steps = record.tokens_per_second, self.settings.steps
        self.screen.step(Shown(record.step, steps, record.loss, rate, record.variant))


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
        batch = own_rows(whole, dist.get_rank(), dist.get_world_size())
        dist.barrier()
        start = time.perf_counter()
        train_step(model, optimizer, batch)
        dist.barrier()
        tokens.append(num_tokens(whole))
        seconds.append(time.perf_counter() - start)
    return Throughput(tuple(tokens[1:]), tuple(seconds[1:]))  # the first one warms up


def _gathered_events(events: list[Event]) -> Timeline:
    """Return all ranks' events as one timeline; collective. Processes of one machine share its clock."""
    everyone: list[list[Event]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, events)
    return Timeline(tuple(event for own in everyone for event in own), "measured on the emulated devices")


class Rank:
    """One rank's way through the demo: read `work` from top to bottom."""

    def __init__(self, folder: Path, settings: DemoSettings, *, quotas: bool) -> None:
        self.folder, self.settings = folder, settings
        self.screen = make_screen(shows=dist.get_rank() == 0)
        self.devices = devices_for(settings, quotas=quotas)
        self.text, self.model = Text(settings, library_pieces()), make_model(settings)

    def work(self) -> None:
        """Measure, plan, train, compare, save."""
        cluster = self._measure()
        # Measuring and training are the subject: a device of 0.2 cores would take long over a capture.
        self.devices.favour_first()
        plans, predicted = self._plan(cluster)
        self.devices.make_equal()
        optimizer = make_optimizer(self.model, self.settings)
        batch = self._own(self.text.batch(0))
        hetu_fx.auto_parallelize(self.model, batch, plan=plans, cluster=cluster, optimizer=optimizer)
        self.devices.make_unequal()

        self.screen.head(f"Training {num_parameters(self.model) / 1e6:.1f} M parameters")
        training = Training(self.model, optimizer, self.text, self.devices, self.screen)
        training.run()
        self.screen.head("The same batches by DDP with even shares, on the same devices")
        shares = even_shares(self.text, self.devices, self.screen)
        self._save(training, shares, cluster, predicted)

    def _own(self, batch: Batch) -> Batch:
        return own_rows(batch, dist.get_rank(), dist.get_world_size())

    def _measure(self) -> Cluster:
        self.devices.make_unequal()
        cluster = Cluster.measure()
        self.screen.head("Devices, as measured")
        self.screen.say(str(cluster))
        return cluster

    def _plan(self, cluster: Cluster) -> tuple[list[Plan], Timeline]:
        """Plan both variants; also return the first plan's simulated timeline (empty on other ranks than 0)."""
        self.screen.head("Plans, and why")
        long = self.text.batch(self.settings.long_at[0])
        wanted = (Wanted("usual", self.text.batch(0), max_length=self.settings.length), Wanted("long", long))
        plans, costs = plan_variants(self.model, cluster, wanted)
        for plan in plans:
            self.screen.say(f"{plan.explain()}\n")
        return plans, simulate(plans[0], costs[0], cluster).timeline if costs else Timeline(())

    def _save(
        self, training: Training, shares: Mapping[str, Throughput], cluster: Cluster, predicted: Timeline
    ) -> None:
        self.screen.head("Saving and exporting")
        self.devices.make_equal()
        handle = _handle_of(self.model)
        held_out = loss_of(self.model, self._own(self.text.held_out()))
        weights = {name: full_tensor(parameter) for name, parameter in self.model.named_parameters()}
        handle.save(self.folder / "checkpoint")
        handle.export(self.folder / "export")
        record = RunRecord(
            records=tuple(training.records),
            slowed=training.slowed,
            slowed_rank=self.devices.slowed_rank,
            even_shares=shares,
            plans={name: plan.to_json() for name, plan in handle.variants.items()},
            measured=_gathered_events(training.events),
            predicted=predicted,
            held_out_loss=held_out,
            weights=digest(weights),
            num_parameters=num_parameters(self.model),
        )
        if dist.get_rank() == 0:
            cluster.write(self.folder / "cluster.json")
            record.write(self.folder / "run.json")
        self.screen.end()


def _handle_of(model: nn.Module) -> Handle:
    """Return the parallel model's handle."""
    return cast(Handle, model.hetu)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter as a whole; collective for a home parameter."""
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole


def main() -> None:
    """Read the command line and work."""
    parser = argparse.ArgumentParser("python -m hetu_fx.demo.rank", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quotas", action="store_true", help="the devices' speeds are CPU quotas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", timeout=WAIT)
    Rank(options.folder, settings_for(quick=options.quick), quotas=options.quotas).work()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
