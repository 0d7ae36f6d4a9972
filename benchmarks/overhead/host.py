"""The host's work for a step and for a micro-batch, besides the model's own ops: a model of next to no work tells it.

A GPU is kept waiting where its host takes longer to say what to do than the GPU to do it. The model's blocks are so
small that a step is nothing but the host's work; that of the plain model, for the same micro-batches one after another,
is taken off.

Each model runs some steps in a row before it is another one's turn, as a training loop runs one model: what counts is a
host whose caches hold the code of that loop. Steps that take turns, so that each comes after tens of milliseconds of
other models, are in the table too: there a step finds little of its code and data in the caches.

Between stages, only the time is counted in which the thread that drives the model works: not what it waits for the
other stage. It sleeps but for the first 0.2 ms of a wait, in which it looks again and again; what it spends on that,
once it has looked in vain, is a column of its own.

Besides, how many of hetu_fx's own functions a call of the model runs, of one micro-batch: whatever the machine is.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hetu_fx
from benchmarks.kit.contest import Step, barrier, loss_of
from benchmarks.kit.fleet import rank_here, run_workers, world_here
from benchmarks.kit.nets import Mlp
from benchmarks.kit.report import Bar, Part, Row
from benchmarks.kit.smallest import least
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers.memory import Peers
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx_emulate.emulate import EmulateSpec, Output

BLOCKS, WIDTH = 12, 8
FEW, MANY = 1, 9  # micro-batches
STEP_BAR, MICRO_BATCH_BAR = 1.0, 0.3
CALLS_BARS = 456, 875  # of one process, and of one of two stages
ROWS = 2 * MANY  # so that all are alike
IN_A_ROW = 20
WARM_UP = 10
TURNS = ", in turns"
CALLS = "own calls"
OWN = f"{Path(hetu_fx.__file__).parent}/"

Milliseconds = dict[str, float]
"""Medians of one process, by who and how many micro-batches."""


def measured(*, quick: bool) -> Part:
    """Run one process, and two that are stages."""
    one, two = (fleet(count, quick=quick) for count in (1, 2))
    bars = [
        bar("one process: host milliseconds a step", step_cost(one[0]), STEP_BAR),
        bar("one process: host milliseconds a micro-batch", micro_batch_cost(one[0]), MICRO_BATCH_BAR),
        bar("two stages: host milliseconds a step", max(map(step_cost, two)), STEP_BAR),
        bar("two stages: host milliseconds a micro-batch", max(map(micro_batch_cost, two)), MICRO_BATCH_BAR),
    ]
    for name, told, most in zip(("one process", "two stages"), (one, two), CALLS_BARS, strict=True):
        bars.append(
            Bar(
                f"{name}: own functions run in a call of the model",
                max(each[CALLS] for each in told),
                most,
                at_least=False,
            )
        )
    return bars, [row_of(f"{len(f)} process", rank, told) for f in (one, two) for rank, told in enumerate(f)]


def bar(name: str, value: float, most: float) -> Bar:
    """Make a bar from above."""
    return Bar(f"{name} besides the model's own ops", value, most, at_least=False)


def micro_batch_cost(told: Mapping[str, float], how: str = "") -> float:
    """Return what one more micro-batch takes, less what it takes the plain model."""
    pairs = ((told[f"{who} {MANY}{how}"], told[f"{who} {FEW}{how}"]) for who in ("hetu_fx", "plain"))
    ours, plain = ((many - few) / (MANY - FEW) for many, few in pairs)
    return ours - plain


def step_cost(told: Mapping[str, float], how: str = "") -> float:
    """Return what a step takes besides its micro-batches."""
    return told[f"hetu_fx {FEW}{how}"] - told[f"plain {FEW}{how}"] - FEW * micro_batch_cost(told, how)


def row_of(setting: str, rank: int, told: Mapping[str, float]) -> Row:
    """Make the line of one process."""
    in_a_row = {name: milliseconds for name, milliseconds in told.items() if TURNS not in name}
    return {"setting": setting, "rank": rank, **costs_of(told, ""), **costs_of(told, TURNS), **in_a_row}


def costs_of(told: Mapping[str, float], how: str) -> Milliseconds:
    """Return what a step and a micro-batch take, by columns of the table."""
    return {f"a step, ms{how}": step_cost(told, how), f"a micro-batch, ms{how}": micro_batch_cost(told, how)}


def fleet(num_ranks: int, *, quick: bool) -> Sequence[Milliseconds]:
    """Run so many stages, a core each; give what each has found."""
    spec, given = EmulateSpec(speeds=(1.0,) * num_ranks), ["--part", "host", *["--quick"] * quick]
    output = Output(prefix=num_ranks > 1)
    found: list[Milliseconds] = run_workers(
        "overhead", given, spec, output=output, timeout_seconds=300, limit="affinity"
    )
    return found


def work(*, quick: bool) -> Sequence[Milliseconds]:
    """Be one process; give what all have found."""
    steps = {f"hetu_fx {count}": our_step(count) for count in (FEW, MANY)}
    steps |= {f"plain {count}": plain_step(count) for count in (FEW, MANY)}
    rounds = least(20 if quick else 100, 2 * IN_A_ROW)
    with waits_apart() as waits:
        told = medians(steps, waits, rounds, in_a_row=1)
        found = {f"{name}{TURNS}": milliseconds for name, milliseconds in told.items()}
        found[CALLS] = own_calls()
        return all_gather_object(GroupTable(), medians(steps, waits, rounds // IN_A_ROW, in_a_row=IN_A_ROW) | found)


def medians(steps: Mapping[str, Step], waits: Waits, rounds: int, *, in_a_row: int) -> Milliseconds:
    """Run the steps in turns, some in a row; give the medians of this thread's milliseconds, waits apart."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    waited: dict[str, list[float]] = {f"{name}, waits": [] for name in steps}
    for number in range(1 + rounds):
        for name, step in steps.items():
            barrier()
            for _ in range(in_a_row if number else WARM_UP):
                seconds, of_waits = thread_seconds(step, waits)
                if number:
                    spent[name].append((seconds - of_waits) * 1e3)
                    waited[f"{name}, waits"].append(of_waits * 1e3)
    return {name: statistics.median(values) for name, values in (spent | waited).items()}


def own_calls() -> int:
    """Count the calls of hetu_fx's functions in a call of the model."""
    model, own = ours(FEW)
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OWN)

    for is_last in (False, False, True):
        barrier()
        sys.setprofile(see if is_last else None)
        try:
            loss = loss_of(model, own)
        finally:
            sys.setprofile(None)
        loss.backward()
    return count


def thread_seconds(step: Step, waits: Waits) -> tuple[float, float]:
    """Return the processor time of this thread in a step, and what of it are waits."""
    waits.seconds, start = 0.0, time.thread_time()
    step()
    return time.thread_time() - start, waits.seconds


@dataclass
class Waits:
    """The processor time that this thread has spent on looking for other ranks, once it has looked in vain."""

    seconds: float = 0.0


@contextmanager
def waits_apart() -> Iterator[Waits]:
    """Count them meanwhile."""
    counted, until = Waits(), Peers.until

    def waiting(*what: Any) -> Any:
        start = time.thread_time()
        try:
            return until(*what)
        finally:
            counted.seconds += time.thread_time() - start

    with mock.patch.object(Peers, "until", waiting):
        yield counted


def inputs() -> Tensor:
    """Make the whole batch."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def ours(count: int) -> tuple[Any, Mapping[str, Tensor]]:
    """Make our model of so many micro-batches, of which every process is a stage, and its rows here."""
    world = world_here()
    plan = Plan((Pipeline(tuple(Stage((rank,)) for rank in range(world)), micro_batches=count),))
    own = {"x": inputs().chunk(world)[rank_here()]}
    return hetu_fx.auto_parallelize(Mlp(WIDTH, BLOCKS).train(), own, plan=plan), own


def our_step(count: int) -> Step:
    """Make our step of so many micro-batches."""
    model, own = ours(count)
    return gradients_of(model, model.zero_grad, [own])


def plain_step(count: int) -> Step:
    """Make the step of the plain model of one stage, which every process has for itself."""
    model = Mlp(WIDTH, BLOCKS // world_here()).train()
    return gradients_of(model, model.zero_grad, [{"x": part} for part in inputs().chunk(count)])


def gradients_of(model: torch.nn.Module, clear: Callable[[], None], batches: Sequence[Mapping[str, Tensor]]) -> Step:
    """Make the gradients of a model anew, batch by batch."""

    def step() -> None:
        clear()
        for batch in batches:
            loss_of(model, batch).backward()

    return step
