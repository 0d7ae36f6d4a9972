"""What goes around between devices that compute: sums over rows, parameters that several parts read, and how long.

Such a parameter is counted once where one stage has all of its readers, else in each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.records import REQUIRED, Key, record
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import cheapest_ring_cost
from hetu_fx.errors import PlanError, ProfileError


def turn_seconds(num_bytes: float, ranks: Sequence[int], cluster: Cluster, *, of_sum: bool = False) -> float:
    """Return the seconds of one turn of `num_bytes` in all: a gather or a reduce-scatter; an all-reduce is two.

    `of_sum`: one of these two.
    Each turn is a meeting besides, as it waits anew for all. 0 for one device.
    """
    return cheapest_ring_cost(num_bytes, ranks, cluster, of_sum=of_sum) + cluster.meeting_seconds(ranks)


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
        return self.count * 2 * turn_seconds(self.bytes / self.count, ranks, cluster, of_sum=True)


NO_ROW_SUMS = RowSums()


ROW_SUMS = record(RowSums, ProfileError, count=Key(default=REQUIRED), bytes=Key(written="always"))


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several parts read.

    Attributes:
        bytes: of the whole of it.
        split_bytes: how many of them a tensor parallel group holds in shares.
        readers: numbers of the parts that read it, in order; the costs of the first one count it.
    """

    bytes: float
    split_bytes: float
    readers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.split_bytes <= self.bytes:
            raise PlanError(f"tied parameter: split_bytes is {self.split_bytes}\nhint: give 0 to {self.bytes}")
        if len(self.readers) < 2 or list(self.readers) != sorted(set(self.readers)) or self.readers[0] < 0:
            raise PlanError(f"tied parameter: readers are {list(self.readers)}\nhint: give two parts or more, in order")

    def at(self, share: float) -> float:
        """Return the bytes on a device that has `share` of what is split."""
        return self.bytes - self.split_bytes * (1 - share)

    def within(self, first: int, last: int) -> tuple[int, ...]:
        """Return the readers from part `first` up to, without, `last`."""
        return tuple(reader for reader in self.readers if first <= reader < last)

    def is_extra(self, first: int, last: int) -> bool:
        """Tell whether those parts read it, but its first reader, which counts it, is not among them."""
        held = self.within(first, last)
        return bool(held) and held[0] != self.readers[0]

    def is_shared(self, first: int, last: int) -> bool:
        """Tell whether those parts read it, and others too."""
        return 0 < len(self.within(first, last)) < len(self.readers)


def pending_gradient_bytes(tied: Sequence[TiedParameter], first: int, count: int, share: float) -> list[float]:
    """Return for each of `count` parts the bytes of gradients that wait for another reader's while it goes backward."""
    spans = [(one.within(first, first + count), one.at(share)) for one in tied]
    waiting = [(held[0] - first, held[-1] - first, size) for held, size in spans if held]
    return [sum(size for start, stop, size in waiting if start <= part < stop) for part in range(count)]


def gradient_bytes(parameters: Sequence[float], tied: Sequence[TiedParameter], first: int, share: float) -> list[float]:
    """Return the bytes of gradients that each part's backward makes, from those of the parameters that it counts.

    The last reader of a parameter among the parts is the first to make its gradient.

    Args:
        parameters: bytes of each part on the device.
        tied: those of the program.
        first: number of the first part.
        share: of what is split.
    """
    made = list(parameters)
    for one in tied:
        held = one.within(first, first + len(parameters))
        if held:
            made[held[-1] - first] += one.at(share)
            if held[0] == one.readers[0]:
                made[held[0] - first] -= one.at(share)
    return made
