"""What Malleus plans for: devices with straggling rates, a model of equal layers, its memory, the batch.

A tensor parallel group of g devices of straggling rates x_i takes, for one layer and one micro-batch,

    y = seconds(g) max_i x_i                                                                     (1)

with seconds(g) measured on healthy devices (the paper's alpha times its tau). A stage of l layers that r
stages follow keeps r + 1 micro-batches in flight (1F1B); on each device of its group it needs

    (k_r l + edge [first or last stage]) / g <= memory - reserve                                 (2)

This is the model of Malleus' released planner (Malleus: SIGMOD 2025, DOI 10.1145/3725322). Left out on purpose:
that planner takes groups slower than normal by less than 1.2 as healthy. Which devices straggle is decided
where rates are measured; rates are taken here as they are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.device_orders import ranks_by_node


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of a layer over the whole group that holds it, by how many stages follow.

    `layer_bytes[r]` is k_r in (2): parameters, gradients, optimizer states, and activations of r + 1
    micro-batches; beyond its end it goes on as its last two entries do. `edge_bytes` come on top on a
    pipeline's first and last stage (embedding, head), `reserve_bytes` on every device.
    """

    layer_bytes: tuple[float, ...]
    edge_bytes: float = 0.0
    reserve_bytes: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_bytes", tuple(self.layer_bytes))
        table = self.layer_bytes
        if not table or table[0] <= 0 or any(b < a for a, b in itertools.pairwise(table)):
            raise PlanError(
                f"layer_bytes are {list(table)}\n"
                f"hint: give bytes above 0 that do not fall, the last stage's first (each earlier stage keeps one more "
                f"micro-batch)"
            )
        check_not_negative(PlanError, "layer memory", edge_bytes=self.edge_bytes, reserve_bytes=self.reserve_bytes)

    @classmethod
    def linear(cls, state_bytes: float, activation_bytes: float, *, edge_bytes: float = 0.0) -> LayerMemory:
        """Build it from what a layer holds always, and what it keeps per micro-batch in flight."""
        table = (state_bytes + activation_bytes, state_bytes + 2 * activation_bytes)
        return cls(table, edge_bytes)

    def at(self, num_following: int) -> float:
        """Return k_r in (2) for a stage that `num_following` stages follow."""
        table = self.layer_bytes
        beyond = num_following - len(table) + 1
        if beyond <= 0:
            return table[num_following]
        return table[-1] + beyond * (table[-1] - table[-2] if len(table) > 1 else 0.0)


@dataclass(frozen=True)
class MalleusSituation:
    """Everything that the search reads; equal situations lead to equal results.

    Attributes:
        cluster: the devices that can be used, with their nodes and straggling rates. A device of lower
            normal speed than the fastest counts as slower by that factor. Leave failed devices out.
        num_layers: L, the model's repeated blocks.
        num_micro_batches: M, micro-batches of one size in a step, over all pipelines.
        num_pipelines: how many pipelines stand side by side (Malleus keeps this degree fixed).
        layer_seconds: seconds of one layer and one micro-batch on a healthy group, by its number of devices
            (powers of two). The largest degree is the one that devices without stragglers keep.
        memory: None when memory is ample.
        rates: each device's straggling rate x, relative to the normal speed of the fastest device.
    """

    cluster: Cluster
    num_layers: int
    num_micro_batches: int
    num_pipelines: int
    layer_seconds: Mapping[int, float] = field(hash=False)
    memory: LayerMemory | None = None
    rates: Mapping[int, float] = field(init=False, compare=False, repr=False)
    _fastest_rate: float = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        normal = max(device.flops_per_second for device in self.cluster.devices)
        rates = {device.rank: normal / device.speed for device in self.cluster.devices}
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "_fastest_rate", min(rates.values()))
        given = dict(sorted(self.layer_seconds.items(), reverse=True))
        object.__setattr__(self, "layer_seconds", given)
        for name in ("num_layers", "num_micro_batches", "num_pipelines"):
            if getattr(self, name) < 1:
                raise PlanError(f"situation has {name} {getattr(self, name)}\nhint: give 1 or more")
        _check_degrees(given)
        if self.num_micro_batches < self.num_pipelines:
            raise PlanError(
                f"{self.num_micro_batches} micro-batches for {self.num_pipelines} pipelines\n"
                f"hint: give each at least one, by smaller micro-batches or fewer pipelines"
            )

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the sizes that a group may have, largest first."""
        return tuple(self.layer_seconds)

    def straggles(self, rank: int) -> bool:
        """Tell whether a device is slower than the fastest."""
        return self.rates[rank] > self._fastest_rate

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node."""
        return tuple(map(tuple, ranks_by_node(self.cluster.devices, self.cluster).values()))

    def room_bytes(self, devices: tuple[int, ...]) -> float:
        """Return what (2) leaves a group for layers, over all its devices."""
        if self.memory is None:
            return math.inf
        least = min(self.cluster.device(rank).memory_bytes for rank in devices)
        return len(devices) * (least - self.memory.reserve_bytes)


def _check_degrees(seconds: Mapping[int, float]) -> None:
    if not seconds or any(degree < 1 or degree & (degree - 1) for degree in seconds):
        raise PlanError(
            f"layer_seconds has degrees {list(seconds)}\nhint: give powers of two, such as {{2: 1.0, 1: 1.9}}"
        )
    values = list(seconds.values())
    check_positive(PlanError, "layer_seconds", **{f"[{degree}]": value for degree, value in seconds.items()})
    if any(slower <= faster for faster, slower in itertools.pairwise(values)):
        raise PlanError(
            f"layer_seconds are {dict(seconds)}: a larger group is no faster than a smaller one\n"
            f"hint: leave that degree out"
        )
