"""Seconds that the HeteroAuto search takes, if it equals an exhaustive one, and when a mixed cluster is superlinear.

The model is of the 100B class, on synthetic chips (`cases.heteroauto`). First, up to 1,024 chips of four kinds, and of
kinds with less memory; seconds are those of the processor, which depend less on what else runs. Then small problems
of up to 3 kinds and 32 chips beside every pipeline that there is. Then the speed-up ratio of 64 fast chips of little
memory beside 64 slow ones of much, over the sum of both alone, with one thing at a time switched off: the cause is
what takes the ratio to 1 and below.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cases.heteroauto import ablations, four_kinds, speed_up, superlinear
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.cluster.cluster import Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, HeteroProblem, Layer, SearchSpace
from hetu_fx.planner.search.heteroauto.search import search
from tests.planner.search.heteroauto.exhaustive import Exhaustive

SECONDS_BAR = 60.0
CAUSES = ("limits of memory", "the cost of recomputing")
MEMORY = (1.0, 0.3, 0.12)  # of what the chips have


def main() -> int:
    """Measure and judge."""
    quick = (
        parser("searches.heteroauto", "Seconds, exactness and superlinear speed-up of HeteroAuto.").parse_args().quick
    )
    timed = [timed_row(chips, share) for chips in ((1024,) if quick else (128, 1024)) for share in MEMORY]
    exact = [exact_row(seed) for seed in range(4 if quick else 24)]
    ratios = list(ratio_rows(quick))
    by_name = {str(row["case"]): float(str(row["ratio"])) for row in ratios}
    slowest = max(float(str(row["seconds"])) for row in timed if row["chips"] == 1024)
    bars = [
        Bar("seconds for 1024 chips of 4 kinds, 96 layers (slowest)", slowest, SECONDS_BAR, at_least=False),
        Bar(
            "largest difference to the exhaustive search", max(float(str(r["difference"])) for r in exact), 1e-9, False
        ),
        Bar("speed-up ratio of a mixed cluster", by_name[case_of("nothing")], 1.05, at_least=True),
        *(Bar(f"speed-up ratio without {cause}", by_name[case_of(cause)], 1.0, at_least=False) for cause in CAUSES),
    ]
    return finish("searches.heteroauto", bars, [*ratios, *exact, *timed])


def timed_row(chips: int, share: float) -> Row:
    """Search once on so many chips, a quarter of each kind, with a share of their memory."""
    whole = four_kinds(chips // 4)
    given = replace(whole, kinds=tuple(replace(k, memory_bytes=share * k.memory_bytes) for k in whole.kinds))
    case = f"4 kinds, {share:.0%} of their memory"
    start = time.process_time()
    try:
        result = search(given)
    except PlanError:
        return {"case": case, "chips": chips, "seconds": time.process_time() - start, "plan": "none fits"}
    return {
        "case": case,
        "chips": chips,
        "seconds": time.process_time() - start,
        "step seconds": result.seconds,
        "one size per kind": result.coarse_seconds,
        "solved": result.num_arranged,
        "plan": shown(str(result)),
    }


def exact_row(seed: int) -> Row:
    """Compare with every pipeline there is."""
    given = small_problem(random.Random(seed))
    exhaustive = Exhaustive(given)
    best, found = exhaustive.seconds, search(given).seconds
    return {
        "case": f"{len(given.kinds)} kinds, {given.num_layers} layers",
        "chips": sum(kind.chips for kind in given.kinds),
        "step seconds": found,
        "all pipelines": exhaustive.num_pipelines,
        "difference": abs(found / best - 1),
    }


def small_problem(drawn: random.Random) -> HeteroProblem:
    """Draw up to 3 kinds, 32 chips in all at most, of which the last has ample memory so that something fits."""
    count = drawn.randint(2, 3)
    kinds = tuple(small_kind(str(index), drawn, ample=index == count - 1) for index in range(count))
    return HeteroProblem(
        kinds, drawn.randint(4, 6), 4, Link(drawn.choice([1.0, 10.0])), 0.1, freedom=SearchSpace(split_kinds=False)
    )


def small_kind(name: str, drawn: random.Random, *, ample: bool) -> ChipKind:
    """Draw a kind of 8 or 16 chips, the last one of 8."""
    speed, worth = drawn.uniform(0.5, 2.0), drawn.uniform(0.7, 1.0)
    layers = {
        degree: Layer(speed / degree**worth, 2 * speed / degree**worth, 1 / degree, 1 / degree, 0.1)
        for degree in drawn.choice([(1, 2), (2, 4), (1, 4)])
    }
    memory = 1e9 if ample else drawn.choice([6.0, 9.0, 14.0])
    nodes = (4, 4) if ample else drawn.choice([(8,), (4, 4, 4)])
    return ChipKind(name, nodes, memory, layers, Link(100.0), Link(10.0), drawn.choice([0.0, 0.1]))


def ratio_rows(quick: bool) -> Iterator[Row]:
    """Switch off one thing at a time, for all chips and for each kind alone."""
    for name, given in ablations(superlinear()).items():
        if quick and name not in ("nothing", *CAUSES):
            continue
        found = speed_up(given)
        alone = {f"{kind} alone": "none fits" if one is None else one.seconds for kind, one in found.alone.items()}
        yield {
            "case": case_of(name),
            "chips": sum(kind.chips for kind in given.kinds),
            "step seconds": found.together.seconds,
            **alone,
            "ratio": found.ratio,
            "recompute": sum(stage.recompute for stage in found.together.stages),
            "recompute alone": sum(s.recompute for one in found.alone.values() if one for s in one.stages),
        }


def case_of(left_out: str) -> str:
    """Name an ablation."""
    return "as it is" if left_out == "nothing" else f"without {left_out}"


def shown(plan: str) -> str:
    """Shorten a plan, of which stages may be many, to what a column holds."""
    return plan if len(plan) <= 100 else f"{plan[:97]}..."


if __name__ == "__main__":
    sys.exit(main())
