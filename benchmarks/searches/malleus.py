"""Seconds that the Malleus search takes, and how good its assignments are, for 8 to 1,024 devices.

The model is the published Llama-70B on nodes of 8 devices with groups of up to 8, four stages a pipeline when
nobody straggles, and a micro-batch per device. Stragglers are spread over nodes. Seconds are those of the
processor, which depend less on what else runs. The objective is shown over that without stragglers, beside
what work split at will would take.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cases.published_malleus import DEVICES_PER_NODE, LLAMA_70B, ideal_slowdown
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.planner.search.malleus.search import search
from hetu_fx.planner.search.malleus.situation import MalleusSituation

STAGES = 4
RATES = (2.57, 5.63, 12.53)
BARS = {(64, 3): 2.0, (1024, 3): 60.0, (1024, 16): 60.0}  # seconds


def main() -> int:
    """Measure and judge."""
    options = parser("searches.malleus", "Seconds of the Malleus search for 8 to 1,024 devices.").parse_args()
    rows = [measure(devices, count) for devices, count in cases(options.quick)]
    known = {(row["devices"], row["stragglers"]): row["seconds"] for row in rows}
    bars = [
        Bar(f"seconds for {devices} devices, {count} stragglers", float(str(known[devices, count])), bar, False)
        for (devices, count), bar in BARS.items()
        if (devices, count) in known
    ]
    return finish("searches.malleus", bars, rows)


def cases(quick: bool) -> Iterator[tuple[int, int]]:
    """Yield (devices, stragglers)."""
    for devices in (8, 16, 32, 64) if quick else (8, 16, 32, 64, 128, 256, 512, 1024):
        yield from ((devices, count) for count in (1, 3, 16) if count <= devices // 4)


def measure(devices: int, stragglers: int) -> Row:
    """Search once; the stragglers are the same every time."""
    chosen = random.Random(devices + stragglers)
    rates = {rank: chosen.choice(RATES) for rank in sorted(chosen.sample(range(devices), stragglers))}
    given = situation(devices, rates)
    start = time.process_time()
    result = search(given)
    seconds = time.process_time() - start
    healthy = given.num_micro_batches * given.num_layers / (devices / DEVICES_PER_NODE)
    return {
        "devices": devices,
        "stragglers": stragglers,
        "seconds": seconds,
        "slowdown": result.objective / healthy,
        "at will": ideal_slowdown(given),
        "standby": len(result.standby),
        "pipelines tried": result.num_pipelines_tried,
        "proved": result.is_exact,
    }


def situation(devices: int, rates: dict[int, float]) -> MalleusSituation:
    """Give the published model on so many devices."""
    pipelines = max(1, devices // (DEVICES_PER_NODE * STAGES))
    model = replace(LLAMA_70B, devices=devices, pipelines=pipelines)
    given = model.situation(rates, micro_batches=max(64, devices))
    return given if devices >= DEVICES_PER_NODE * STAGES else replace(given, memory=None)


if __name__ == "__main__":
    sys.exit(main())
