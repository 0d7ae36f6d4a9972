"""Seconds of a collective over all devices: a fixed part, and one in proportion to the bytes that count.

Parts of unequal size are gathered (or scattered) in one of two ways, chosen tensor by tensor at n devices:

    padded     every part as large as the largest: n max_i r_i S bytes                           (1)
    grouped    a message per part, of the exact size: S bytes                                    (2)

with ratios r and S the whole tensor's bytes (HAP, EuroSys 2024, section 2.5.1). (1) is faster when parts are
near equal, as one collective is faster than messages of the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_all_reduce_cost, cheapest_ring_cost, padded_cost, ring_cost, send_cost
from hetu_fx.errors import PlanError
from hetu_fx.planner.values.line import Line

REFERENCE_BYTES = 1 << 24
"""Size at which a cluster's costs are taken as lines through their value at no bytes."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of all devices; without the grouped ones everything is padded.

    The bytes of an all-to-all and of padded parts are (1), those of others S. `shift` moves boundaries of
    parts: its bytes are what passes the busiest boundary, times two.
    """

    all_gather: Line
    reduce_scatter: Line
    all_reduce: Line
    all_to_all: Line
    shift: Line
    grouped_all_gather: Line | None = None
    grouped_reduce_scatter: Line | None = None

    def __post_init__(self) -> None:
        lines = (getattr(self, field.name) for field in fields(self))
        for seconds, per_byte in (line for line in lines if line is not None):
            if not all(math.isfinite(value) and value >= 0 for value in (seconds, per_byte)):
                raise PlanError(f"a collective has {seconds} seconds, {per_byte} per byte; give 0 or more")

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Collectives:
        """Build them from a cluster's collectives among all its devices where they were timed, else from its links.

        The links price them as the comm ops that run are priced.
        """
        ranks = cluster.ranks
        lines = {
            "all_gather": padded_cost,
            "reduce_scatter": padded_cost,
            "all_reduce": cheapest_all_reduce_cost,
            "all_to_all": _all_to_all_cost,
            "shift": send_cost,
            "grouped_all_gather": cheapest_ring_cost,
            "grouped_reduce_scatter": cheapest_ring_cost,
        }
        return cls(**{name: _line(cost, ranks, cluster) for name, cost in lines.items()} | _timed(cluster))


def _timed(cluster: Cluster) -> dict[str, Line]:
    """Return the collectives that were timed among all devices of a cluster."""
    where = "inter" if len({device.node for device in cluster.devices}) > 1 else "intra"
    return {
        timed.name: Line(timed.latency_seconds, 1 / timed.bytes_per_second)
        for timed in cluster.collectives
        if (timed.where, timed.num_ranks) == (where, len(cluster.ranks))
    }


_Cost = Callable[[float, Sequence[int], Cluster], float]


def _line(cost: _Cost, ranks: Sequence[int], cluster: Cluster) -> Line:
    fixed = cost(0.0, ranks, cluster)
    return Line(fixed, (cost(float(REFERENCE_BYTES), ranks, cluster) - fixed) / REFERENCE_BYTES)


def _all_to_all_cost(num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Price an all-to-all of a tensor: of its part, a device keeps what stays its own."""
    return ring_cost(num_bytes / len(ranks), ranks, cluster)
