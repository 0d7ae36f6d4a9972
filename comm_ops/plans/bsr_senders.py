"""Who of a slice's owners sends it to a receiver (Hetu v2 section 5.3), as a table of choices to compare.

A receiver that owns the slice is always its own sender. Otherwise `load`, the default, takes the owner on the
receiver's node that has sent least within nodes so far, else the owner that has sent least between nodes;
`lowest` takes the lowest rank (the paper's baseline without a heuristic), `round_robin` the next in turn.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

NodeOf = Callable[[int], int]
_Heap = list[tuple[int, int, int]]  # load when last seen, place among the owners, rank


class OwnerSet:
    """The ranks that hold one summand of a slice, ready to be asked for the least loaded."""

    def __init__(self, ranks: Sequence[int], node_of: NodeOf) -> None:
        self.ranks, self.members = tuple(ranks), frozenset(ranks)
        self.far: _Heap = [(0, place, rank) for place, rank in enumerate(ranks)]
        self.near: dict[int, _Heap] = {}
        for place, rank in enumerate(ranks):
            self.near.setdefault(node_of(rank), []).append((0, place, rank))


class Senders:
    """Chooses senders by load, and counts the bytes that every rank has sent, within its node and to others.

    Every choice takes amortised logarithmic time: loads only grow, so the heaps are put right when looked at.
    """

    def __init__(self, node_of: NodeOf) -> None:
        self.node_of = node_of
        self.within: defaultdict[int, int] = defaultdict(int)
        self.between: defaultdict[int, int] = defaultdict(int)
        self._sets: dict[tuple[int, ...], OwnerSet] = {}

    def owners(self, ranks: tuple[int, ...]) -> OwnerSet:
        """Return the owner set of `ranks`; slices with the same owners share it."""
        if ranks not in self._sets:
            self._sets[ranks] = OwnerSet(ranks, self.node_of)
        return self._sets[ranks]

    def sender(self, owners: OwnerSet, receiver: int) -> int:
        """Choose the owner that sends to `receiver`."""
        return receiver if receiver in owners.members else self._choose(owners, receiver)

    def price(self, sender: int, receiver: int) -> tuple[int, int]:
        """Compare transfers: local, then inside a node, then between nodes; then by load."""
        if sender == receiver:
            return 0, 0
        return (1, self.within[sender]) if self._same_node(sender, receiver) else (2, self.between[sender])

    def add(self, sender: int, receiver: int, num_bytes: int) -> None:
        """Count a transfer."""
        if sender != receiver:
            counter = self.within if self._same_node(sender, receiver) else self.between
            counter[sender] += num_bytes

    def _choose(self, owners: OwnerSet, receiver: int) -> int:
        near = owners.near.get(self.node_of(receiver))
        return _least(near, self.within) if near else _least(owners.far, self.between)

    def _same_node(self, a: int, b: int) -> bool:
        return self.node_of(a) == self.node_of(b)


class LowestRank(Senders):
    """Chooses the lowest rank."""

    def _choose(self, owners: OwnerSet, receiver: int) -> int:
        return min(owners.ranks)


class RoundRobin(Senders):
    """Chooses the owners of every set in turn."""

    def __init__(self, node_of: NodeOf) -> None:
        super().__init__(node_of)
        self._turns: defaultdict[OwnerSet, itertools.count[int]] = defaultdict(itertools.count)

    def _choose(self, owners: OwnerSet, receiver: int) -> int:
        return owners.ranks[next(self._turns[owners]) % len(owners.ranks)]


SENDERS: Mapping[str, type[Senders]] = {"load": Senders, "lowest": LowestRank, "round_robin": RoundRobin}


def _least(heap: _Heap, loads: Mapping[int, int]) -> int:
    """Return the least loaded rank, of equals the first; the top is right once its load is what was last seen."""
    while True:
        load, place, rank = heap[0]
        if loads[rank] == load:
            return rank
        heapq.heapreplace(heap, (loads[rank], place, rank))
