"""Seconds until a model is parallel: capture, deduction and specialization for 8 devices, on one core.

The model is a GPT-2 of 12 layers and width 768; the plan mixes stages and degrees. No process is started:
what one rank does for itself is done here for each of the 8, though a rank specializes only its own part.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.kit.models import batch, gpt2
from benchmarks.kit.report import Bar, Part
from hetu_fx.graph.capture import capture
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import deduce_program, make_program
from hetu_fx.transforms.specialize.specialize import Specialize

T = TypeVar("T")
SECONDS_BAR = 10.0
NUM_DEVICES = 8
PLAN = Plan(
    (
        Pipeline((Stage((0, 1), (2, 1), 8), Stage((2, 3), (), 4)), share=2, micro_batches=2),
        Pipeline((Stage((4, 5, 6, 7), (), 12),), share=1),
    )
)


def measured(*, quick: bool) -> Part:
    """Measure and judge."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    runs = [prepare() for _ in range(1 if quick else 3)]
    seconds = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    rows = [{"step": step, "seconds": value} for step, value in seconds.items()]
    total = sum(seconds.values())
    bar = Bar("seconds for 8 devices on one core", total, SECONDS_BAR, at_least=False)
    return [bar], [*rows, {"step": "in all", "seconds": total}]


def prepare() -> dict[str, float]:
    """Make the graphs of all devices from a new model; give the seconds of each step."""
    model = gpt2(width=768, layers=12)
    example = batch(rows=5, tokens=64, vocabulary=50257)
    graph, capture_seconds = timed(lambda: capture(model, example, training=True))
    program, passes_seconds = timed(lambda: make_program(graph, frozenset()))
    deduced, deduce_seconds = timed(lambda: deduce_program(program, PLAN, wants_values=False))
    _, specialize_seconds = timed(lambda: [Specialize(rank)(deduced) for rank in range(NUM_DEVICES)])
    return {
        "capture": capture_seconds,
        "graph passes and factor classes": passes_seconds,
        "deduction": deduce_seconds,
        "specialization, all 8": specialize_seconds,
    }


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Do something; give its result and how long it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
