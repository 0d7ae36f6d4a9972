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

from benchmarks.report import Bar, Row, finish, parser
from hetu_fx.planner.malleus.search import search
from hetu_fx.planner.malleus.situation import LayerMemory, Situation
from hetu_fx.topology import Cluster

NODE, STAGES, LAYERS = 8, 4, 80
LAYER_SECONDS = {8: 1.0, 4: 1.90, 2: 3.66, 1: 7.22}  # relative to a healthy group of 8
MEMORY_MIB = 81252
LAYER_MIB = (1647, 1769, 1933, 2110, 2295, 2485, 2685, 2895)  # per device, the last stage's first
MEMORY = LayerMemory(tuple(NODE * mib for mib in LAYER_MIB), edge_bytes=NODE * 600, reserve_bytes=4700 + 4096)
RATES = (2.57, 5.63, 12.53)
BARS = {(64, 3): 2.0, (1024, 3): 60.0, (1024, 16): 60.0}  # seconds


def main() -> int:
    """Measure and judge."""
    options = parser("planning_malleus", "Seconds of the Malleus search for 8 to 1,024 devices.").parse_args()
    rows = [measure(devices, count) for devices, count in cases(options.quick)]
    known = {(row["devices"], row["stragglers"]): row["seconds"] for row in rows}
    bars = [
        Bar(f"seconds for {devices} devices, {count} stragglers", float(str(known[devices, count])), bar, False)
        for (devices, count), bar in BARS.items()
        if (devices, count) in known
    ]
    return finish("planning_malleus", bars, rows)


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
    healthy = given.num_micro_batches * LAYERS / (devices / NODE)
    return {
        "devices": devices,
        "stragglers": stragglers,
        "seconds": seconds,
        "slowdown": result.objective / healthy,
        "at will": given.ideal_slowdown,
        "standby": len(result.standby),
        "pipelines tried": result.num_pipelines_tried,
        "proved": result.is_exact,
    }


def situation(devices: int, rates: dict[int, float]) -> Situation:
    """Give the published model on so many devices."""
    nodes = [str(rank // NODE) for rank in range(devices)]
    cluster = Cluster.on_paper([1e12] * devices, memory_bytes=MEMORY_MIB, nodes=nodes).with_rates(rates)
    pipelines = max(1, devices // (NODE * STAGES))
    memory = MEMORY if devices >= NODE * STAGES else None
    return Situation(cluster, LAYERS, max(64, devices), pipelines, LAYER_SECONDS, memory)


if __name__ == "__main__":
    sys.exit(main())
