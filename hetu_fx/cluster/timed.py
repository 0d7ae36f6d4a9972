"""Which collectives were timed among groups like a given one, and what a turn around the ring took there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Protocol

from hetu_fx.cluster.devices import Collective, Device

Group = tuple[str, int, int]
"""(kind, ranks, nodes) of a group of alike devices; without a kind, of one that is not."""

SIZES = (1 << 14, 1 << 18, 1 << 22)
"""Bytes of the whole tensor: the smallest tells the latency, it and the largest the bandwidth."""

_TURNS = {
    "all_gather": ("all_gather", 1),
    "grouped_all_gather": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "grouped_reduce_scatter": ("reduce_scatter", 1),
    "all_reduce": ("all_reduce", 2),
}
"""What is done by what is timed, padded or grouped, and how often that goes around the ring."""


class _Cluster(Protocol):
    def device(self, rank: int) -> Device: ...

    def node_of(self, rank: int) -> int: ...


def timed_by_group(
    collectives: Sequence[Collective], groups: Mapping[str, Sequence[int]], node_of: Callable[[int], int]
) -> dict[Group, list[Collective]]:
    """Return those of collectives that are turns around a ring, by the group that they were timed among.

    `groups` are those of the cluster that collectives without a kind stand for, by where.
    """
    found: dict[Group, list[Collective]] = {}
    for timed in collectives:
        nodes = 1 if timed.where == "intra" else timed.num_nodes
        own = groups.get(timed.where, ())
        if not timed.kind and len(own) == timed.num_ranks:
            nodes = len(set(map(node_of, own)))
        if nodes and timed.name in _TURNS:
            found.setdefault((timed.kind, timed.num_ranks, nodes), []).append(timed)
    return found


def met_seconds(pairs: Sequence[float]) -> float:
    """Return what a meeting of several costs, from what one of two costs each.

    When two meet that each come at any moment of a period, the last one comes after 2/3 of it, 1/6 after the middle; of
    n, after n/(n+1). Those that lose little in a pair come on time: they count by what they lose beside the latest.
    """
    latest = max(pairs)
    number = max(2.0, sum(pairs) / latest) if latest else 2.0
    return latest * 3 * (number - 1) / (number + 1)


def _group_of(ranks: Sequence[int], cluster: _Cluster) -> Group:
    """Return what a group is like; its kind is told where all its devices are alike."""
    devices = [cluster.device(rank) for rank in ranks]
    alike = {(device.kind, device.flops_per_second) for device in devices}
    kind = devices[0].kind if len(alike) == 1 else ""
    return kind, len(ranks), len({cluster.node_of(rank) for rank in ranks})


def seen_turn(
    timed: Mapping[Group, Sequence[Collective]],
    num_bytes: float,
    ranks: Sequence[int],
    cluster: _Cluster,
    *,
    of_sum: bool = False,
) -> float | None:
    """Return the seconds of a turn, the mean of gathers and reduce-scatters, or `of_sum`: half an all-reduce.

    Of what was timed of another sort alone, that; None where nothing was.

    Each is done in the faster of the ways that were timed, as the runtime does it: list forms of gloo that pad take
    four times as long as messages.
    """
    kind, size, nodes = _group_of(ranks, cluster)
    known = timed.get((kind, size, nodes)) or timed.get(("", size, nodes))
    if not known:
        return None
    least = _least(known, num_bytes)
    wanted = [seconds for done, seconds in least.items() if (done == "all_reduce") is of_sum]
    return fmean(wanted or least.values())


def _least(timed: Sequence[Collective], num_bytes: float) -> Mapping[str, float]:
    """Return the least seconds of a turn by what is done."""
    found: dict[str, float] = {}
    for one in timed:
        done, turns = _TURNS[one.name]
        seconds = one.seconds(num_bytes) / turns
        found[done] = min(seconds, found.get(done, seconds))
    return found
