"""Turns around rings of devices that compute, and the sums over rows in the middle of a step that take such turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.records import REQUIRED, Key, record
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.errors import ProfileError


def turn_seconds(num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of one turn of `num_bytes` in all: a gather or a reduce-scatter; an all-reduce is two.

    Each turn is a meeting besides, as it waits anew for all. 0 for one device.
    """
    return cheapest_ring_cost(num_bytes, ranks, cluster) + cluster.meeting_seconds(ranks)


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over the rows of all replicas, such as those of BatchNorm: how many in a step, and their bytes."""

    count: int = 0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(ProfileError, "sums over rows", count=self.count, bytes=self.bytes)

    def __bool__(self) -> bool:
        return self.count > 0

    def seconds(self, ranks: Sequence[int], cluster: Cluster) -> float:
        """Return what they take among one device of each replica: two turns, each of which is a meeting."""
        if len(ranks) < 2 or not self:
            return 0.0
        return self.count * 2 * turn_seconds(self.bytes / self.count, ranks, cluster)


NO_ROW_SUMS = RowSums()


ROW_SUMS = record(RowSums, ProfileError, count=Key(default=REQUIRED), bytes=Key(written="always"))
