"""What adapting to stragglers gains, by Malleus' own cost, beside what was published.

Published (SIGMOD 2025, abstract): 2.63 to 5.28 times on average over systems that do not adapt, up to 6.73 times, for
models of 32B, 70B and 110B on 32 and 64 A800. The situations behind those figures are not known here, so each of the
published rates (2.57, 5.63, 12.53) is given to one device, to one device of each of three nodes, and to a whole node.
Models, clusters, layer seconds and memory are the published ones (`cases.published_malleus`). What does not adapt keeps
equal stages on equal groups, so that the slowest device sets the pace; what restarts leaves out every node with a
straggler, and has as many micro-batches to do with the others.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

from benchmarks.cases.published_malleus import (
    DEVICES_PER_NODE,
    LLAMA_32B,
    LLAMA_70B,
    LLAMA_110B,
    Published,
    ideal_slowdown,
)
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.planner.search.malleus.search import search

MODELS = {"32B, 32 A800": LLAMA_32B, "70B, 64 A800": LLAMA_70B, "110B, 64 A800": LLAMA_110B}
RATES = (2.57, 5.63, 12.53)
PUBLISHED = (2.63, 5.28)  # the least and the largest average
MICRO_BATCHES = 64


def main() -> int:
    """Measure and judge."""
    options = parser("ladder_malleus", "Gains of adapting to stragglers, as published.").parse_args()
    models = {"70B, 64 A800": LLAMA_70B} if options.quick else MODELS
    rows = [row for name, model in models.items() for row in measure(name, model)]
    gains = [statistics.fmean(_gains(rows, name)) for name in models]
    bars = [
        Bar(f"average gain, {name} (published: {PUBLISHED[0]} to {PUBLISHED[1]})", gain, PUBLISHED[0], True)
        for name, gain in zip(models, gains, strict=True)
    ]
    print(f"inputs: {MICRO_BATCHES} micro-batches, rates {RATES}; each on 1 device, 1 in each of 3 nodes, a whole node")
    return finish("ladder_malleus", bars, rows)


def _gains(rows: list[Row], model: str) -> list[float]:
    return [float(str(row["gain"])) for row in rows if row["model"] == model]


def situations() -> Iterator[tuple[str, dict[int, float]]]:
    """Yield the situations, named."""
    for rate in RATES:
        yield f"1 device, {rate}", {0: rate}
        yield f"3 nodes, {rate}", {node * DEVICES_PER_NODE: rate for node in range(3)}
        yield f"a node, {rate}", dict.fromkeys(range(DEVICES_PER_NODE), rate)


def measure(name: str, model: Published) -> Iterator[Row]:
    """Plan for each situation, and work out what equal stages would take."""
    healthy = MICRO_BATCHES * model.layers / (model.devices / max(model.layer_seconds))
    nodes = model.devices // DEVICES_PER_NODE
    for title, rates in situations():
        found = search(model.situation(rates, MICRO_BATCHES))
        slow = len({rank // DEVICES_PER_NODE for rank in rates})
        yield {
            "model": name,
            "stragglers": title,
            "ours / healthy": found.objective / healthy,
            "at will / healthy": ideal_slowdown(model.situation(rates, MICRO_BATCHES)),
            "equal stages / healthy": max(rates.values()),
            "without slow nodes / healthy": nodes / (nodes - slow),
            "gain": max(rates.values()) * healthy / found.objective,
            "gain over a restart": nodes / (nodes - slow) * healthy / found.objective,
        }


if __name__ == "__main__":
    sys.exit(main())
