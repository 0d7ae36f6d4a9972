"""The ways that messages between two devices can take, and how fast each was seen to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.base.checks import standing_twice

DIRECT, STAGED = "direct", "staged"
WAYS = (DIRECT, STAGED)
"""From where a tensor is, or through the host."""
PLACES = ("intra", "inter")
"""Inside a node, or between nodes."""
USUAL_BYTES = 1 << 20
"""Of the messages by which ways are compared."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a message was seen to take: `latency_seconds + bytes / bytes_per_second`.

    Attributes:
        way: one of WAYS.
        types: of the devices at both ends, in alphabetical order.
        where: one of PLACES.
        bytes_per_second, latency_seconds: what it takes.
    """

    way: str
    types: tuple[str, str]
    where: str
    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message of so many bytes takes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    @property
    def ends(self) -> tuple[tuple[str, str], str]:
        """Return between what it goes."""
        return self.types, self.where


Ends = tuple[tuple[str, str], str]


def quickest(ways: Iterable[Way]) -> Mapping[Ends, Way]:
    """Return the way that takes a usual message least time, between whatever ends there are; direct where equal."""
    found: dict[Ends, Way] = {}
    for way in sorted(ways, key=lambda one: (one.seconds(USUAL_BYTES), WAYS.index(one.way))):
        found.setdefault(way.ends, way)
    return found


def stood_twice(ways: Sequence[Way]) -> list[tuple[str, Ends]]:
    """Return what ways are told of twice."""
    return standing_twice((one.way, one.ends) for one in ways)
