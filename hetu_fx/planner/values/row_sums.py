"""Sums over the rows of all replicas in the middle of a step, such as those of BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.records import REQUIRED, Key, record
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import ProfileError
from hetu_fx.planner.values.ring import turn_seconds


@dataclass(frozen=True, slots=True)
class RowSums:
    """How many there are in a step, forward and backward, and their bytes in all."""

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
