"""Seconds to dispatch and pack a batch of unequal lengths, and how far from a bound what is found is.

Llama 32B on A800s with the constants that Hydraulis published, and the seven strategies of its case study on 64
devices; a pool proposed from the lengths themselves; and 1024 devices. Lengths are log-normal, cut at the longest
sequence, with seeds. Every strategy is dispatched, refined and packed, though a choice needs only some.

The first ratio is the dispatch over its bound, the second the packed step over the bounds of the packings of its
last pipeline, the third the packed step over the bound of any dispatch: what rows cost is in it, so that it would
be above 1 for the best step too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Bar, Row, finish, parser
from hetu_fx.planner.hydraulis.choose import choose, holding, packed
from hetu_fx.planner.hydraulis.cost import Scheme, SequenceBatch, Strategy, TimeFit
from hetu_fx.planner.hydraulis.dispatch import dispatch
from hetu_fx.planner.hydraulis.memory import HomeLayout, MemoryModel, ModelShape, fitting_schemes
from hetu_fx.planner.hydraulis.pool import propose
from hetu_fx.planner.hydraulis.refine import refine

SECONDS_BAR = 1.0
DISPATCH_BAR = 1.05
BARRED = "200 sequences, 7 strategies"
MIB = 1 << 20
FITS = {  # milliseconds by (tensor parallel degree, stages)
    (1, 4): (9.392e-7, 2.1260e-1, 35.99),
    (2, 2): (3.7342e-6, 2.1306e-1, 80.72),
    (2, 4): (1.9703e-6, 1.0656e-1, 42.94),
    (4, 1): (3.8695e-6, 2.3900e-1, 120.7),
    (4, 2): (2.0456e-6, 1.1830e-1, 65.42),
    (4, 4): (1.0578e-6, 5.9212e-2, 35.34),
    (8, 1): (2.1255e-6, 1.4141e-1, 122.9),
    (8, 2): (1.0679e-6, 7.1058e-2, 61.77),
    (8, 3): (6.855e-7, 4.8275e-2, 38.07),
    (16, 1): (1.3778e-6, 1.0244e-1, 145.7),
}
STUDY = (
    ((4, (16, 1)),),
    ((1, (16, 1)), (2, (8, 3))),
    ((1, (16, 1)), (6, (8, 1))),
    ((1, (16, 1)), (12, (4, 1))),
    ((1, (8, 3)), (10, (4, 1))),
    ((1, (8, 1)), (14, (4, 1))),
    ((8, (4, 2)),),
)
LARGE = (((64, (16, 1)),), ((1, (16, 1)), (3, (8, 1)), (238, (4, 1)), (2, (4, 4))))


@dataclass(frozen=True, slots=True)
class Case:
    """Batches of one kind and the strategies that are tried on them."""

    name: str
    strategies: Sequence[Strategy]
    batches: Sequence[SequenceBatch]


def main() -> int:
    """Measure and judge."""
    options = parser(
        "planning_hydraulis", "Seconds and quality of dispatching and packing unequal lengths."
    ).parse_args()
    rows = [row for case in cases(2 if options.quick else 8) for row in measure(case)]
    barred = [row for row in rows if row["case"] == BARRED]
    seconds = statistics.median(float(str(row["seconds"])) for row in barred)
    ratio = statistics.median(float(str(row["dispatch / bound"])) for row in barred)
    bars = [
        Bar(f"seconds, {BARRED} (median of the batches)", seconds, SECONDS_BAR, at_least=False),
        Bar(f"dispatch over its bound, {BARRED} (median)", ratio, DISPATCH_BAR, at_least=False),
    ]
    return finish("planning_hydraulis", bars, rows)


def cases(repetitions: int) -> Iterator[Case]:
    """List what is measured."""
    schemes = published_schemes()
    study = [built(schemes, parts) for parts in STUDY]
    yield Case(BARRED, study, [batch(200, 12000, seed) for seed in range(repetitions)])
    for size in (50, 800):
        yield Case(f"{size} sequences, 7 strategies", study, [batch(size, 12000, seed) for seed in range(2)])
    yield Case("200 sequences up to 32k, 7 strategies", study, [batch(200, 32768, seed) for seed in range(2)])
    many = batch(20000, 32768, 0).lengths
    pool = propose(schemes, {n: count / 100 for n, count in Counter(many).items()}, study[0], step=1024)
    yield Case("200 sequences up to 32k, pool of its own", pool.strategies, [batch(200, 32768, 1)])
    large = [built(schemes, parts) for parts in LARGE]
    yield Case("1600 sequences, 1024 devices", large, [batch(1600, 32768, 0)])


def measure(case: Case) -> Iterator[Row]:
    """Time every strategy that holds a batch, and the choice among them."""
    for number, lengths in enumerate(case.batches):
        start = time.process_time()
        found = [
            (one, packed(refine(one))) for one in (dispatch(s, lengths) for s in holding(case.strategies, lengths))
        ]
        seconds = time.process_time() - start
        start = time.process_time()
        choice = choose(case.strategies, lengths)
        yield {
            "case": case.name,
            "batch": number,
            "strategies": len(found),
            "seconds": seconds,
            "seconds of a choice": time.process_time() - start,
            "dispatch / bound": statistics.fmean(one.seconds / one.bound_seconds for one, _ in found),
            "worst": max(one.seconds / one.bound_seconds for one, _ in found),
            "packing / bound": statistics.fmean(
                last.seconds / last.bound_seconds
                for last in (max(done.packings, key=lambda one: one.seconds) for _, done in found)
            ),
            "step / dispatch bound": choice.seconds / choice.dispatch.bound_seconds,
            "step seconds": choice.seconds,
            "chosen": str(choice.strategy),
        }


def published_schemes() -> tuple[Scheme, ...]:
    """Build the schemes of Llama 32B on A800 with 80 GB."""
    memory = MemoryModel(
        shape=ModelShape(layers=60, hidden=6656, vocabulary=30592),
        home=HomeLayout(replicas=4, tensor_parallel=16, stages=1),
        state_bytes=201,
        activation_bytes={1: 36, 2: 36, 4: 37, 8: 42, 16: 50},
        device_bytes=81252 * MIB,
        reserve_bytes=10240 * MIB,
        runtime_bytes=5000 * MIB,
    )
    times = {key: TimeFit(*(constant / 1e3 for constant in constants)) for key, constants in FITS.items()}
    return fitting_schemes(times, memory, {1: 384, 2: 512, 4: 768, 8: 1024, 16: 1280})


def built(schemes: Sequence[Scheme], parts: Sequence[tuple[int, tuple[int, int]]]) -> Strategy:
    """Build a strategy from `(pipelines, (tensor parallel degree, stages))`."""
    by_key = {(scheme.tensor_parallel, scheme.stages): scheme for scheme in schemes}
    return Strategy(tuple(by_key[key] for count, key in parts for _ in range(count)))


def batch(size: int, longest: int, seed: int) -> SequenceBatch:
    """Draw lengths with a long tail."""
    lengths = np.random.default_rng(seed).lognormal(6.8, 1.2, size)
    return SequenceBatch(tuple(int(length) for length in np.clip(lengths, 64, longest)))


if __name__ == "__main__":
    sys.exit(main())
