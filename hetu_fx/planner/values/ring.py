"""What devices lose when they communicate around a ring between pieces of compute."""

from __future__ import annotations

from collections.abc import Sequence

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost


def turn_seconds(num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of one turn of `num_bytes` in all: a gather or a reduce-scatter; an all-reduce is two.

    Each turn is a meeting besides, as it waits anew for all. 0 for one device.
    """
    return cheapest_ring_cost(num_bytes, ranks, cluster) + cluster.meeting_seconds(ranks)
