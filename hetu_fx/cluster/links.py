"""Measure the links between ranks, which ranks send or receive less than a link carries, and the collectives.

Messages may cost the processor's time, and devices of a node may have different ends of its network: then a link is as
fast as the slower of the two. So neighbours in speed on a node send to each other. The fastest of them tell the link
inside nodes; what the others reach is a device's own limit. Between nodes their fastest ranks send, each to each other
in rounds of pairs that send at once; between many nodes, each two kinds of them. What most pairs have is the link
between nodes; those that are clearly unlike are told apart, so that one slow machine makes no other one slow.

Collectives are timed as they run, padded and grouped. Parts are near equal, and not equal: padding costs next to
nothing, and still each part goes in a message of its own where parts are grouped.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.base.device_types import device_type_record
from hetu_fx.cluster.devices import Collective, Device, PairLink
from hetu_fx.cluster.timed import SIZES
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Message, Tag, post

_LATENCY_ROUNDS = 20
_BANDWIDTH_ROUNDS = 3  # so many that a device with a CPU quota has used up what it saved while it waited
_BANDWIDTH_BYTES = 8 << 20  # of several chunks where it is staged, and far more than a link lets through at once
_LONE_LINK = (1e10, 0.0)  # no link to measure: what a lone device's moves would cost in memory
_CLEARLY = 0.8  # below so much of the link's bandwidth, a device's limit is its own
_LATE = 0.5  # so much less latency is clearly less, and
_SAME_LATENCY = 1e-4  # seconds below which all latencies are one
_MOST_NODES = 16  # of which each two are timed

Pair = tuple[int, int]
Timed = Mapping[Pair, tuple[float, float]]
"""(bytes per second, latency seconds) of pairs."""


def measure_links(
    table: GroupTable,
    nodes: Sequence[str],
    types: Sequence[str],
    kinds: Sequence[str],
    speeds: Sequence[float],
    device: str,
) -> tuple[dict[str, tuple[float, float]], tuple[PairLink, ...], dict[int, float]]:
    """Return (bytes per second, latency seconds) inside a node and between nodes, unlike pairs, and limits of ranks.

    Collective. Links stand under "intra" and "inter"; where no two ranks stand on one node, or all do, the other's
    numbers stand for both. Where devices of several types stand on one node, "intra" is what links those of one type
    there, and "types" what links the types, whose messages go another way; "inter" is then what all pairs have, as
    levels have no pairs. Limits are the bytes per second of those ranks that reach clearly less than the link "intra".
    """
    units = node_units(nodes, types)
    timed: dict[Pair, tuple[float, float]] = {}
    for pairs in neighbours(units, speeds):
        timed |= time_pairs(table, pairs, device)
    between = _time_in_turn(table, pairs_of_types(nodes, types, speeds), device)
    across: dict[Pair, tuple[float, float]] = {}
    for pairs in node_rounds(nodes, kinds, speeds):
        across |= time_pairs(table, pairs, device)
    usual, unlike = settled_pairs(across, nodes, kinds)
    reached = settled_limits(timed, units, speeds)
    seen = {"intra": _fastest(timed, reached), "types": _slowest(between)}
    seen["inter"] = _slowest(across) if between else usual
    found = {name: link for name, link in seen.items() if link}
    known = next(iter(found.values()), _LONE_LINK)
    links = {"intra": known, "inter": known} | found
    return links, unlike, {rank: most for rank, most in reached.items() if most < _CLEARLY * links["intra"][0]}


def node_units(nodes: Sequence[str], types: Sequence[str]) -> list[str]:
    """Return the node of each rank, or, where some node has devices of several types, which of them on which node."""
    mixed = len(set(zip(nodes, types, strict=True))) > len(set(nodes))
    return [f"{node} {kind}" if mixed else node for node, kind in zip(nodes, types, strict=True)]


def pairs_of_types(nodes: Sequence[str], types: Sequence[str], speeds: Sequence[float]) -> list[Pair]:
    """Return the fastest ranks of neighbouring types on each node."""
    firsts: dict[tuple[str, str], int] = {}
    for ranks in _fastest_first(nodes, speeds):
        for rank in ranks:
            firsts.setdefault((nodes[rank], types[rank]), rank)
    return [(a, b) for a, b in itertools.pairwise(firsts.values()) if nodes[a] == nodes[b]]


def _time_in_turn(table: GroupTable, pairs: Sequence[Pair], device: str) -> dict[Pair, tuple[float, float]]:
    timed: dict[Pair, tuple[float, float]] = {}
    for pair in pairs:
        timed |= time_pairs(table, [pair], device)
    return timed


def neighbours(nodes: Sequence[str], speeds: Sequence[float]) -> tuple[list[Pair], list[Pair]]:
    """Return each rank with the next slower one of its node, in two rounds in which no rank stands twice."""
    chains = [list(itertools.pairwise(ranks)) for ranks in _fastest_first(nodes, speeds)]
    first, second = ([pair for chain in chains for pair in chain[start::2]] for start in (0, 1))
    return first, second


def node_rounds(nodes: Sequence[str], kinds: Sequence[str], speeds: Sequence[float]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of the fastest ranks of nodes: each two, of many nodes each two kinds of them."""
    heads = [ranks[0] for ranks in _fastest_first(nodes, speeds)]
    if len(heads) <= _MOST_NODES:
        return [[(heads[a], heads[b]) for a, b in pairs] for pairs in tournament(len(heads)) if pairs]
    of_kind: dict[str, list[int]] = {}
    for head in heads:
        of_kind.setdefault(kinds[head], []).append(head)
    alike = [list(zip(ranks[::2], ranks[1::2], strict=False)) for ranks in of_kind.values()]
    unlike = [list(zip(*two, strict=False)) for two in itertools.combinations(of_kind.values(), 2)]
    return [pairs for pairs in (*alike, *unlike) if pairs]


def tournament(count: int) -> list[list[Pair]]:
    """Return rounds in which each player meets one other, or none, so that all meet: one stays, the others turn."""
    players, rounds = [*range(count), *[-1] * (count % 2)], []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def settled_pairs(
    timed: Timed, nodes: Sequence[str], kinds: Sequence[str]
) -> tuple[tuple[float, float] | None, tuple[PairLink, ...]]:
    """Return what most pairs have, of as many the slower, and the pairs that have clearly more or less."""
    is_many = len(set(nodes)) > _MOST_NODES
    of, names = ("kinds", kinds) if is_many else ("nodes", nodes)
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (a, b), figures in timed.items():
        one, other = sorted((names[a], names[b]))
        seen.setdefault((one, other), []).append(figures)
    medians = [[statistics.median(column) for column in zip(*figures, strict=True)] for figures in seen.values()]
    speeds = group_figures([speed for speed, _ in medians], 1 - _CLEARLY)
    waits = group_figures([max(wait, _SAME_LATENCY) for _, wait in medians], _LATE)
    groups: dict[tuple[float, float], list[int]] = {}
    for place, figures in enumerate(zip(speeds, waits, strict=True)):
        groups.setdefault(figures, []).append(place)
    links = {key: (key[0], statistics.median(medians[i][1] for i in places)) for key, places in groups.items()}
    if not groups:
        return None, ()
    usual = max(groups, key=lambda key: (len(groups[key]), -key[0], key[1]))
    pairs = list(seen)
    unlike = (PairLink(pairs[i], *links[key], of) for key in groups if key != usual for i in groups[key])
    return links[usual], tuple(sorted(unlike, key=lambda pair: pair.between))


def group_figures(figures: Sequence[float], tolerance: float) -> list[float]:
    """Return figures, rounded, in which those within `tolerance` of a group's largest are its median."""
    result = [0.0] * len(figures)
    left = sorted(range(len(figures)), key=lambda i: -figures[i])
    while left:
        group = [i for i in left if figures[i] >= figures[left[0]] * (1 - tolerance)]
        median = float(f"{statistics.median(figures[i] for i in group):.3g}")
        for index in group:
            result[index] = median
        left = left[len(group) :]
    return result


def settled_limits(timed: Timed, nodes: Sequence[str], speeds: Sequence[float]) -> dict[int, float]:
    """Return what each rank reaches with the next faster one of its node, the fastest with the next slower one.

    Ranks of one speed on a node reach the same: their median.
    """
    reached: dict[int, float] = {}
    for pair, (bandwidth, _) in timed.items():
        reached[pair[1]] = bandwidth
    for pair, (bandwidth, _) in timed.items():
        reached.setdefault(pair[0], bandwidth)
    same: dict[tuple[str, float], list[float]] = {}
    for rank, bandwidth in reached.items():
        same.setdefault((nodes[rank], speeds[rank]), []).append(bandwidth)
    return {rank: float(f"{statistics.median(same[nodes[rank], speeds[rank]]):.3g}") for rank in sorted(reached)}


def _fastest(timed: Timed, reached: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the most that a rank reaches, and the longest latency: there is one figure of that for all."""
    return (max(reached.values()), max(wait for _, wait in timed.values())) if timed else None


def _slowest(timed: Timed) -> tuple[float, float] | None:
    return (min(b for b, _ in timed.values()), max(wait for _, wait in timed.values())) if timed else None


def _fastest_first(nodes: Sequence[str], speeds: Sequence[float]) -> list[list[int]]:
    """Return the ranks of each node, fast ones first."""
    members = [[rank for rank, name in enumerate(nodes) if name == node] for node in dict.fromkeys(nodes)]
    return [sorted(ranks, key=lambda rank: -speeds[rank]) for ranks in members]


def time_pairs(
    table: GroupTable, pairs: Sequence[Pair], device: str, *, is_staged: bool = False
) -> dict[Pair, tuple[float, float]]:
    """Return (bytes per second, latency seconds) of pairs that send at the same time; the others wait. Collective.

    Messages go the way that a pair has, or through the host where `is_staged`.
    """
    own = next((pair for pair in pairs if table.rank in pair), None)
    values = all_gather_object(table, None if own is None else _time_pair(table, own, device, is_staged))
    return {pair: timed for pair in pairs if (timed := values[pair[0]]) is not None}


def _time_pair(table: GroupTable, pair: Pair, device: str, is_staged: bool) -> tuple[float, float]:
    """Return (bytes per second, latency seconds) between this rank and another one."""
    wait = statistics.median(_ping_pong(table, pair, device, 1, _LATENCY_ROUNDS, is_staged))
    whole = statistics.fmean(_ping_pong(table, pair, device, _BANDWIDTH_BYTES, _BANDWIDTH_ROUNDS, is_staged))
    return float(f"{_BANDWIDTH_BYTES / max(whole - wait, 1e-9):.3g}"), float(f"{wait:.3g}")


def _ping_pong(table: GroupTable, pair: Pair, device: str, num_bytes: int, rounds: int, is_staged: bool) -> list[float]:
    """Return the one-way seconds of messages, after one round of warm-up."""
    place = torch.device(device)
    leads = table.rank == pair[0]
    messages = [(pair[1] if leads else pair[0], torch.zeros(num_bytes, dtype=torch.uint8, device=place), Tag.SLICES)]
    ways: tuple[tuple[Sequence[Message], Sequence[Message]], ...] = ((messages, ()), ((), messages))
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for receives, sends in reversed(ways) if leads else ways:
            post(receives, sends, table, is_staged=is_staged).wait()
        device_type_record(place).synchronize(place)
        times.append((time.perf_counter() - start) / 2)
    return times[1:]


_ROUNDS = 5
_PADDED = Algorithm(padded_below=1 << 62)

Run = Callable[[Sequence[Tensor], Sequence[int], GroupTable], object]


def _at_once(ranks: Sequence[int], table: GroupTable, algorithm: Algorithm = FLAT) -> Collectives:
    return Collectives(ranks, algorithm, table, is_async=False)


def _all_reduce(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return _at_once(ranks, table).sum(torch.cat(list(parts))).wait()


def _all_gather(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return _gather(parts, _at_once(ranks, table, _PADDED))


def _gather(parts: Sequence[Tensor], by: Collectives) -> object:
    return by.gather(parts[by.table.position(by.ranks)], [part.shape for part in parts]).wait()


def _grouped_all_gather(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return _gather(parts, _at_once(ranks, table))


def _reduce_scatter(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return _at_once(ranks, table, _PADDED).scatter(parts).wait()


def _grouped_reduce_scatter(parts: Sequence[Tensor], ranks: Sequence[int], table: GroupTable) -> object:
    return _at_once(ranks, table).scatter(parts).wait()


COLLECTIVES: Mapping[str, Run] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "grouped_all_gather": _grouped_all_gather,
    "grouped_reduce_scatter": _grouped_reduce_scatter,
}
"""What is timed, as ops run it; without `grouped`, uneven parts are padded to the largest where they are sent."""


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """Ranks among which collectives are timed; their kind, if all are alike, and the number of nodes they stand on."""

    where: str
    ranks: tuple[int, ...]
    kind: str = ""
    num_nodes: int = 0


def groups_to_time(groups: Mapping[str, tuple[int, ...]], devices: Sequence[Device]) -> tuple[TimedGroup, ...]:
    """Return the groups of a cluster to time: those given (its largest node, all), and of each kind some of every size.

    Inside the node that has most of a kind's alike devices 2, 4, 8 of them; across nodes one of each.
    """
    found = [TimedGroup(where, ranks) for where, ranks in groups.items()]
    alike: dict[tuple[str, float], list[Device]] = {}
    for device in devices:
        alike.setdefault((device.kind, device.flops_per_second), []).append(device)
    for (kind, _), of_kind in sorted(alike.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        if kind not in {group.kind for group in found}:
            found += _of_kind(kind, of_kind)
    return tuple(found)


def _of_kind(kind: str, devices: Sequence[Device]) -> Iterator[TimedGroup]:
    nodes: dict[str, list[int]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device.rank)
    fullest = max(nodes.values(), key=len)
    sizes = [1 << power for power in range(1, len(fullest).bit_length())]
    yield from (TimedGroup("intra", tuple(fullest[:size]), kind, 1) for size in sizes)
    if len(nodes) > 1:
        yield TimedGroup("inter", tuple(ranks[0] for ranks in nodes.values()), kind, len(nodes))


def time_collectives(table: GroupTable, groups: Sequence[TimedGroup], device: str = "cpu") -> tuple[Collective, ...]:
    """Return what each collective takes among each group of ranks, size by size; collective over the table."""
    found = []
    for group in groups:
        for name, run in COLLECTIVES.items():
            mine = table.rank in group.ranks
            own = [_seconds(run, size, group.ranks, table, device) for size in SIZES] if mine else None
            everyone = [seconds for seconds in all_gather_object(table, own) if seconds is not None]
            found.append(timed_collective(name, group, [max(column) for column in zip(*everyone, strict=True)]))
    return tuple(found)


def timed_collective(name: str, group: TimedGroup, seconds: Sequence[float]) -> Collective:
    """Return the collective that takes so many seconds for each of the sizes; the first is its latency.

    What is larger takes no less: where a smaller one has waited longer, for a quota perhaps, that is noise.
    """
    least = [min(seconds[number:]) for number in range(len(seconds))]
    bandwidth = (SIZES[-1] - SIZES[0]) / max(least[-1] - least[0], 1e-9)
    shown = [float(f"{value:.3g}") for value in least]
    line = float(f"{bandwidth:.3g}"), shown[0]
    sizes = dict(zip(SIZES, shown, strict=True))
    return Collective(name, group.where, len(group.ranks), *line, group.kind, group.num_nodes, sizes)


def _seconds(run: Run, num_bytes: int, ranks: Sequence[int], table: GroupTable, device: str) -> float:
    """Return the median seconds of this rank, after one round that warms up."""
    each = max(1, num_bytes // len(ranks) // torch.float32.itemsize)
    lengths = [each] * (len(ranks) - 1) + [each + 1]
    parts = [torch.zeros(length, device=device) for length in lengths]
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        run(parts, ranks, table)
        device_type_record(parts[0].device).synchronize(parts[0].device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
