"""The published models and clusters of Malleus' planner; benchmarks and tests share them.

Memory is in MiB, layer seconds are relative to a layer on a healthy group of the largest degree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.malleus.situation import LayerMemory, MalleusSituation

DEVICES_PER_NODE = 8
SAFE_GAP = 4096


@dataclass(frozen=True)
class Published:
    """A model on its cluster; `layer_mib` is per device, the front stage first, as published."""

    layers: int
    pipelines: int
    devices: int
    layer_seconds: Mapping[int, float]
    layer_mib: Sequence[float]
    edge_mib: float
    reserve_mib: float
    memory_mib: int = 81252

    def situation(self, rates: Mapping[int, float], micro_batches: int = 64) -> MalleusSituation:
        """Return what Malleus plans for, on nodes of 8 devices."""
        degree = max(self.layer_seconds)
        memory = LayerMemory(
            tuple(degree * mib for mib in reversed(self.layer_mib)),
            degree * self.edge_mib,
            self.reserve_mib + SAFE_GAP,
        )
        cluster = nodes_of(DEVICES_PER_NODE, self.devices, memory_bytes=self.memory_mib).with_rates(rates)
        return MalleusSituation(cluster, self.layers, micro_batches, self.pipelines, self.layer_seconds, memory)


def nodes_of(size: int, devices: int, memory_bytes: int = 1 << 40) -> Cluster:
    """Return equal devices in nodes of `size`."""
    nodes = [str(rank // size) for rank in range(devices)]
    return Cluster.on_paper([1e12] * devices, memory_bytes=memory_bytes, nodes=nodes)


LLAMA_70B = Published(
    layers=80,
    pipelines=2,
    devices=64,
    layer_seconds={8: 1.0, 4: 1.90, 2: 3.66, 1: 7.22},
    layer_mib=(2895, 2685, 2485, 2295, 2110, 1933, 1769, 1647),
    edge_mib=600,
    reserve_mib=4700,
)
LLAMA_110B = Published(
    layers=80,
    pipelines=2,
    devices=64,
    layer_seconds={8: 1.0, 4: 1.91, 2: 3.77, 1: 7.35},
    layer_mib=(4240, 3930, 3630, 3338, 3068, 2830, 2597, 2438),
    edge_mib=500,
    reserve_mib=4900,
)
LLAMA_32B = Published(
    layers=60,
    pipelines=4,
    devices=32,
    layer_seconds={2: 1.0, 1: 2.0},
    layer_mib=(4608.02, 4124.24, 3641.99, 3129.95),
    edge_mib=1200,
    reserve_mib=5500,
)
LLAMA_70B_4K = Published(
    layers=80,
    pipelines=4,
    devices=64,
    layer_seconds={4: 1.0, 2: 2.0, 1: 4.0},
    layer_mib=(4450.8, 4095.4, 3745.47, 3389.63, 3038.79, 2693.70),
    edge_mib=1000,
    reserve_mib=4600,
)


def ideal_slowdown(situation: MalleusSituation) -> float:
    """Return N / sum_i 1 / x_i: the step over one without stragglers if work could be split at will."""
    rates = situation.rates.values()
    return len(rates) / math.fsum(1 / rate for rate in rates)
