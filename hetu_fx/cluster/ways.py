"""Ways of messages, as a cluster file and tables for people have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.base.json_values import TEXTS
from hetu_fx.base.records import Key, record
from hetu_fx.base.words import rate_text, seconds_text
from hetu_fx.comm_ops.plans.ways import PLACES, WAYS, Way, quickest, stood_twice
from hetu_fx.errors import ClusterError

HEADER = ("types", "where", "way", "bandwidth", "latency", "")


def _way(types: Sequence[str], **parts: Any) -> Way:
    """Return the way that a file tells of."""
    if len(types) != 2:
        raise ClusterError(f"a way goes between two device types, not {list(types)}\nhint: give the type at each end")
    one, other = sorted(types)
    return Way(types=(one, other), **parts)


WAY = record(
    _way,
    ClusterError,
    like=Way,
    order="way types where bytes_per_second latency_seconds",
    types=Key(TEXTS),
    latency_seconds=Key(written="always"),
)


def check_ways(ways: Sequence[Way]) -> None:
    """Raise `ClusterError` for ways that cannot be, or stand twice."""
    for way in ways:
        what = f"way between {' and '.join(way.types)}"
        if way.way not in WAYS or way.where not in PLACES:
            raise ClusterError(f"{what}: it goes {way.way!r} {way.where!r}\nhint: give one of {WAYS} and of {PLACES}")
        check_positive(ClusterError, what, bytes_per_second=way.bytes_per_second)
        check_not_negative(ClusterError, what, latency_seconds=way.latency_seconds)
    if twice := stood_twice(ways):
        raise ClusterError(f"ways {twice} stand twice\nhint: give each once")


def link_table(ways: Sequence[Way]) -> list[list[str]]:
    """Return the cells of the table of ways, those first whose ends come first."""
    taken = quickest(ways).values()
    return [
        [
            " - ".join(way.types),
            way.where,
            way.way,
            rate_text(way.bytes_per_second),
            seconds_text(way.latency_seconds),
            "taken" if way in taken else "",
        ]
        for way in sorted(ways, key=lambda one: (one.types, one.where, one.way))
    ]
