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

from benchmarks.cases.published_hydraulis import LARGE, POOL, SCHEMES
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.planner.dispatch.dispatch import dispatch
from hetu_fx.planner.dispatch.scheme_costs import SequenceBatch, Strategy
from hetu_fx.planner.search.hydraulis.pool import propose
from tests.oracles.hydraulis_choice import choose, holding, packed, refine

SECONDS_BAR = 1.0
DISPATCH_BAR = 1.05
BARRED = "200 sequences, 7 strategies"


@dataclass(frozen=True, slots=True)
class Case:
    """Batches of one kind and the strategies that are tried on them."""

    name: str
    strategies: Sequence[Strategy]
    batches: Sequence[SequenceBatch]


def main() -> int:
    """Measure and judge."""
    options = parser(
        "searches.hydraulis", "Seconds and quality of dispatching and packing unequal lengths."
    ).parse_args()
    rows = [row for case in cases(2 if options.quick else 8) for row in measure(case)]
    barred = [row for row in rows if row["case"] == BARRED]
    seconds = statistics.median(float(str(row["seconds"])) for row in barred)
    ratio = statistics.median(float(str(row["dispatch / bound"])) for row in barred)
    bars = [
        Bar(f"seconds, {BARRED} (median of the batches)", seconds, SECONDS_BAR, at_least=False),
        Bar(f"dispatch over its bound, {BARRED} (median)", ratio, DISPATCH_BAR, at_least=False),
    ]
    return finish("searches.hydraulis", bars, rows)


def cases(repetitions: int) -> Iterator[Case]:
    """List what is measured."""
    yield Case(BARRED, POOL, [batch(200, 12000, seed) for seed in range(repetitions)])
    for size in (50, 800):
        yield Case(f"{size} sequences, 7 strategies", POOL, [batch(size, 12000, seed) for seed in range(2)])
    yield Case("200 sequences up to 32k, 7 strategies", POOL, [batch(200, 32768, seed) for seed in range(2)])
    many = batch(20000, 32768, 0).lengths
    counts = {n: count / 100 for n, count in Counter(many).items()}
    pool = propose(tuple(SCHEMES.values()), counts, sum(one.devices for one in POOL[0].pipelines), step=1024)
    own = tuple(dict.fromkeys((POOL[0], *(variant.strategy for variant in pool))))
    yield Case("200 sequences up to 32k, pool of its own", own, [batch(200, 32768, 1)])
    yield Case("1600 sequences, 1024 devices", LARGE, [batch(1600, 32768, 0)])


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


def batch(size: int, longest: int, seed: int) -> SequenceBatch:
    """Draw lengths with a long tail."""
    lengths = np.random.default_rng(seed).lognormal(6.8, 1.2, size)
    return SequenceBatch(tuple(int(length) for length in np.clip(lengths, 64, longest)))


if __name__ == "__main__":
    sys.exit(main())
