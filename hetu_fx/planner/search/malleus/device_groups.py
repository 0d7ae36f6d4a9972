"""Which tensor parallel groups the devices of a node form (Malleus' grouping: power-of-two splits, pairing).

Groups stay inside a node. Let devices be ordered by straggling rate. Giving each group, slowest group first,
the slowest devices makes no group slower, so some best grouping cuts the order into consecutive runs of
power-of-two sizes, with the standby devices at its slow end: stragglers of like rate share a group. A split
pays when its harmonic capacity

    C = sum over groups of 1 / y                                                                 (1)

rises: one straggler of rate 2.57 among 8 devices leaves 0.39 of a healthy group's capacity, the split into
4 + 2 + 1 without it 0.94 of it.

Two equal groups that could be one of the next degree without loss are never formed: so what has no straggler
keeps the largest degree, and a cut of healthy devices has each smaller size at most once.
Left behind: the released planner cuts one slot per node, in one decreasing run of sizes, and weighs sizes by
hand; here runs of any sizes over the whole node are ranked by (1), and several go on to the placement.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from hetu_fx.planner.search.malleus.situation import MalleusSituation

MOST_CUTS = 24
"""So many groupings of a node, those of largest capacity, are worth placing."""

MOST_GROUPINGS = 48
"""So many groupings of all nodes, besides the two that ignore and that leave out stragglers, are placed."""

_BEAM = 96  # cuts kept of each prefix of a node's devices; a node of 8 has at most as many that matter


class GroupKind(NamedTuple):
    """What the search knows of a group: groups of one kind are interchangeable.

    `seconds` is y, per layer and micro-batch; `room_bytes` what its devices have for layers together.
    """

    seconds: float
    size: int
    room_bytes: float


@dataclass(frozen=True, slots=True)
class Group:
    """A tensor parallel group: ranks in order of their slices, on one node."""

    devices: tuple[int, ...]
    node: int
    kind: GroupKind


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups and the devices that stand by.

    `capacity` is (1), in layers times micro-batches per second; `kinds` are those of the groups, slowest first.
    """

    groups: tuple[Group, ...]
    standby: tuple[int, ...]
    capacity: float = field(init=False)
    kinds: tuple[GroupKind, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", math.fsum(1 / group.kind.seconds for group in self.groups))
        object.__setattr__(self, "kinds", tuple(sorted((group.kind for group in self.groups), reverse=True)))


def node_groupings(situation: MalleusSituation, ranks: Sequence[int]) -> tuple[Grouping, ...]:
    """Return the groupings of a node's ranks (fastest first) worth trying, largest capacity first."""
    found: dict[tuple[GroupKind, ...], Grouping] = {}
    for cut in _best_cuts(situation, ranks):
        grouping = _grouping(situation, ranks, cut)
        found.setdefault(grouping.kinds, grouping)
    return tuple(sorted(found.values(), key=lambda g: (-g.capacity, len(g.groups), g.standby)))


def ignoring_stragglers(situation: MalleusSituation, ranks: Sequence[int]) -> Grouping:
    """Return the grouping of a node's ranks (fastest first) into the largest groups, stragglers or not."""
    return _grouping(situation, ranks, _greedy(situation, ranks))


def leaving_out_stragglers(situation: MalleusSituation, ranks: Sequence[int]) -> Grouping:
    """Return the grouping of a node's ranks (fastest first) into the largest groups without a straggler."""
    healthy = [rank for rank in ranks if not situation.straggles(rank)]
    return _grouping(situation, ranks, _greedy(situation, healthy))


def _greedy(situation: MalleusSituation, ranks: Sequence[int]) -> tuple[int, ...]:
    """Cut devices into the largest groups that they form."""
    sizes, left = [], len(ranks)
    for degree in situation.degrees:
        sizes += [degree] * (left // degree)
        left %= degree
    return tuple(sizes)


def groupings(situation: MalleusSituation, nodes: Sequence[Sequence[int]]) -> Iterator[Grouping]:
    """Yield groupings of the cluster, largest capacity first, then those that ignore or leave out stragglers."""
    choices = [node_groupings(situation, ranks) for ranks in nodes]
    yield from islice(_by_capacity(choices), MOST_GROUPINGS)
    yield _joined(ignoring_stragglers(situation, ranks) for ranks in nodes)
    yield _joined(leaving_out_stragglers(situation, ranks) for ranks in nodes)


def _by_capacity(choices: Sequence[Sequence[Grouping]]) -> Iterator[Grouping]:
    """Yield one choice per node, joined, by falling capacity; what differs only in which node is left out."""
    first = (0,) * len(choices)
    heap = [(-math.fsum(options[0].capacity for options in choices), first)]
    queued, seen = {first}, set()
    while heap:
        _, picks = heapq.heappop(heap)
        grouping = _joined(options[pick] for options, pick in zip(choices, picks, strict=True))
        if grouping.kinds in seen:
            continue  # so are the ones after it, up to which node
        seen.add(grouping.kinds)
        yield grouping
        for node, options in enumerate(choices):
            following = (*picks[:node], picks[node] + 1, *picks[node + 1 :])
            if following[node] < len(options) and following not in queued:
                queued.add(following)
                capacities = (c[pick].capacity for c, pick in zip(choices, following, strict=True))
                heapq.heappush(heap, (-math.fsum(capacities), following))


def _joined(parts: Iterable[Grouping]) -> Grouping:
    together = tuple(parts)
    groups = tuple(group for part in together for group in part.groups)
    return Grouping(groups, tuple(sorted(rank for part in together for rank in part.standby)))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Sizes of consecutive groups over the fastest devices, and the rate of each group."""

    capacity: float = 0.0
    sizes: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[float, int, tuple[int, ...]]:
        return -self.capacity, len(self.sizes), self.sizes

    def extended(self, situation: MalleusSituation, size: int, rate: float) -> _Cut:
        capacity = self.capacity + 1 / (situation.layer_seconds[size] * rate)
        return _Cut(capacity, (*self.sizes, size), (*self.rates, rate))

    def allows(self, situation: MalleusSituation, size: int, rate: float) -> bool:
        """Tell whether a next group is no repetition: of a group to merge with, or of an order of equals."""
        pairs = list(zip(self.sizes, self.rates, strict=True))
        if pairs and pairs[-1][1] == rate and pairs[-1][0] < size:
            return False
        return 2 * size not in situation.layer_seconds or (size, rate) not in pairs


def _best_cuts(situation: MalleusSituation, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of the best cuts of all devices that need not stand by."""
    beams: list[list[_Cut]] = [[_Cut()], *([] for _ in ranks)]
    complete = []
    for start, beam in enumerate(beams):
        kept = sorted(beam, key=lambda cut: cut.key)[:_BEAM]
        left = ranks[start:]
        if len(left) < situation.degrees[-1] or all(map(situation.straggles, left)):  # these may stand by
            complete += kept
        for size in situation.degrees:
            stop = start + size
            if stop <= len(ranks):
                rate = situation.rates[ranks[stop - 1]]
                beams[stop] += [c.extended(situation, size, rate) for c in kept if c.allows(situation, size, rate)]
    yield from (cut.sizes for cut in sorted(complete, key=lambda cut: cut.key)[:MOST_CUTS])


def _grouping(situation: MalleusSituation, ranks: Sequence[int], sizes: Sequence[int]) -> Grouping:
    groups, start = [], 0
    for size in sizes:
        devices = tuple(ranks[start : start + size])
        groups.append(_make_group(situation, devices))
        start += size
    return Grouping(tuple(groups), tuple(ranks[start:]))


def _make_group(situation: MalleusSituation, devices: tuple[int, ...]) -> Group:
    """Return the group of these devices, which stand on one node."""
    seconds = situation.layer_seconds[len(devices)] * max(situation.rates[rank] for rank in devices)
    kind = GroupKind(seconds, len(devices), situation.room_bytes(devices))
    return Group(devices, situation.cluster.node_of(devices[0]), kind)
