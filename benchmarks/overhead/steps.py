"""Steps where there is nothing to gain: one process against eager, two equal ones against DDP, guards.

Every process has one thread and a core of its own. DDP keeps all optimizer states on every process, as zero 0 does;
zero 1, the default, keeps half of them, and gathers the parameters at the start of a step for it.

Before each step, guards tell whether the model is still what was captured: `milliseconds` of that, for many modules.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.contest import Step, adamw, run_rounds, train_step
from benchmarks.kit.fleet import rank_here, run_workers, world_here
from benchmarks.kit.models import Size, batch, llama
from benchmarks.kit.report import Bar, Part, Row, median_ratio
from hetu_fx.annotations.annotation import Annotation
from hetu_fx.graph.bind import GivenBatch
from hetu_fx.program.captures import Programs
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx_emulate.emulate import EmulateSpec, Output

Seconds = dict[str, list[float]]
"""Of each round, by contestant."""

ONE = Size(width=256, layers=4, rows=8, tokens=128)
SMALL = Size(width=256, layers=4, rows=1, tokens=32)
TWO = Size(width=256, layers=4, rows=16, tokens=128)
EAGER_BAR = 1.005
DDP_BAR = 0.99
GUARDS_BAR = 0.2
GUARDED_BLOCKS = 125  # of four modules each


def measured(*, quick: bool) -> Part:
    """Run both contests."""
    one = {str(size): contest(1, size, quick=quick) for size in (ONE, SMALL)}
    two = contest(2, TWO, quick=quick)
    modules, guards = guard_milliseconds()
    bars = [
        Bar(f"guards: milliseconds a step, {modules} modules", guards, GUARDS_BAR, at_least=False),
        Bar("one process: time over eager", ratio(one[str(ONE)], "eager"), EAGER_BAR, at_least=False),
        Bar("two processes, zero 1: time over DDP", ratio(two, "DDP"), DDP_BAR, at_least=False),
        Bar("two processes, zero 0: time over DDP", ratio(two, "DDP", "hetu_fx, zero 0"), DDP_BAR, at_least=False),
    ]
    rows = [row for size, seconds in one.items() for row in table_rows(f"1 process, {size}", seconds, "eager")]
    rows.append({"setting": f"guards of {modules} modules", "who": "hetu_fx", "milliseconds a step": guards})
    return bars, rows + table_rows(f"2 processes, {TWO}", two, "DDP")


def guard_milliseconds(rounds: int = 5, calls: int = 200) -> tuple[int, float]:
    """Give how many modules a model has, and what it takes to read a batch and find its program before each step.

    The parameters are home tensors, as on several ranks. It is the least of the medians of some rounds: others may have
    the machine for a while.
    """
    blocks = [(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1)) for _ in range(GUARDED_BLOCKS)]
    model, example = nn.Sequential(*itertools.chain.from_iterable(blocks)), {"input": torch.ones(4, 8)}
    programs, here = Programs(model, None), Annotation.on((0,))
    for parameter in model.parameters():
        home = HomeTensor(parameter.detach(), home_layout(here, tuple(parameter.shape), 0, 1))
        torch.utils.swap_tensors(parameter, nn.Parameter(home))
    medians = []
    for _ in range(rounds):
        seconds = []
        for _ in range(calls):
            start = perf_counter()
            programs.match(GivenBatch.of(example), True)
            seconds.append(perf_counter() - start)
        medians.append(statistics.median(seconds))
    return len(list(model.modules())), min(medians) * 1e3


def contest(num_ranks: int, size: Size, *, quick: bool) -> Seconds:
    """Run a contest in processes of its own, one core each; give the seconds per round."""
    spec = EmulateSpec(speeds=(1.0,) * num_ranks)
    sizes = ["--size", *map(str, (size.width, size.layers, size.rows, size.tokens))]
    given = ["--part", "steps", *sizes, *["--quick"] * quick]
    found: Seconds = run_workers(
        "overhead", given, spec, output=Output(prefix=num_ranks > 1), timeout_seconds=900, limit="affinity"
    )
    return found


def ratio(seconds: Seconds, other: str, ours: str = "hetu_fx") -> float:
    """Give our time over theirs."""
    return median_ratio(seconds[ours], seconds[other])


def table_rows(setting: str, seconds: Seconds, other: str) -> list[Row]:
    """Make the lines of one contest."""
    return [
        {
            "setting": setting,
            "who": name,
            "milliseconds a step": statistics.median(values) * 1e3,
            "over the other": median_ratio(values, seconds[other]),
        }
        for name, values in seconds.items()
    ]


def work(size: Size, *, quick: bool) -> Seconds:
    """Be one process of a contest; give its seconds."""
    return run_rounds(contestants(size, rank_here(), world_here()), rounds=8 if quick else 30, warm_up=3)


def contestants(size: Size, rank: int, world: int) -> dict[str, Step]:
    """Make our steps and the other's: the same training step of the same rows."""
    whole = batch(size.rows, size.tokens)
    own = {name: value.chunk(world)[rank] for name, value in whole.items()}
    other = llama(size)
    if world == 1:
        return {"hetu_fx": our_step(size, own, world), "eager": train_step(other, adamw(other), own)}
    return {
        "hetu_fx": our_step(size, own, world),
        "hetu_fx, zero 0": our_step(size, own, world, zero=0),
        "DDP": train_step(DistributedDataParallel(other), adamw(other), own),
    }


def our_step(size: Size, own: Mapping[str, Tensor], world: int, zero: int = 1) -> Step:
    """Make our step under even data parallelism."""
    import hetu_fx

    model = llama(size)
    optimizer = adamw(model)
    plan = replace(hetu_fx.Plan.data_parallel(range(world)), zero=zero)
    return train_step(hetu_fx.auto_parallelize(model, own, plan=plan, optimizer=optimizer), optimizer, own)
