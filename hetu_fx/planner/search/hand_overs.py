"""What pipelines take to hand over from stage to stage, each worked out once for all that are alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import hand_over_line
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.group_kinds import GroupKinds
from hetu_fx.planner.search.replica import Replica
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Stage


class HandOvers:
    """The hand-overs of a program between groups of a cluster."""

    def __init__(self, costs: ProgramCosts, cluster: Cluster, kinds: GroupKinds) -> None:
        self._costs, self._cluster, self._kinds = costs, cluster, kinds
        self._lines: dict[Hashable, Line] = {}

    def edges(self, groups: Groups, stops: Sequence[int]) -> list[Line]:
        """Return what each stage but the last hands over to the next one; they end at these blocks."""
        return [self._hand_over(*pair, stop) for pair, stop in zip(itertools.pairwise(groups), stops, strict=True)]

    def _hand_over(self, group: tuple[int, ...], other: tuple[int, ...], block: int) -> Line:
        size = self._costs.boundary(block)
        key = (self._kinds.of((*group, *other)), len(group), size)
        if key not in self._lines:
            stages = Stage(group), Stage(other)
            self._lines[key] = hand_over_line(*stages, size, self._cluster)
        return self._lines[key]

    def among(self, pipelines: Sequence[Groups], replica: Replica) -> tuple[Replica, float]:
        """Return a replica as it is among equal pipelines, and `crossing_seconds` of these.

        Hand-overs of the same stages share links (`crowds`). Besides, a message finds the busiest link taken by others
        for the share of the time that these keep it busy, and waits for half of one, as much as is left on average.
        """
        crossing = self.crossing_seconds(pipelines, replica)
        if not crossing:
            return replica, 0.0
        crowds, own = self.crowds(pipelines), self._own_seconds(replica)
        beat = replica.crowded(crowds).passing.beat(1)
        shares = (max(0.0, crossing - count * seconds) / beat for count, seconds in zip(crowds, own, strict=True))
        waits = [1 + min(1.0, share) / 2 for share in shares]
        return replica.crowded([wait * count for wait, count in zip(waits, crowds, strict=True)]), crossing

    def crossing_seconds(self, pipelines: Sequence[Groups], replica: Replica) -> float:
        """Return for how long a row of each pipeline keeps the busiest link of a node busy with hand-overs."""
        own = self._own_seconds(replica)
        sent: dict[int, float] = {}
        for groups in pipelines:
            nodes = [self._kinds.node[group[0]] for group in groups]
            for (here, there), seconds in zip(itertools.pairwise(nodes), own, strict=True):
                for node in (here, there) if here != there else ():
                    sent[node] = sent.get(node, 0.0) + seconds
        return max(sent.values(), default=0.0)

    def _own_seconds(self, replica: Replica) -> list[float]:
        """Return for how long a row that stages hand over keeps a link between nodes busy, at each edge."""
        stops = itertools.accumulate(replica.blocks[:-1])
        return [self._costs.boundary(stop) / self._cluster.inter.bytes_per_second for stop in stops]

    def crowds(self, pipelines: Sequence[Groups]) -> tuple[int, ...]:
        """Return how many pipelines share the link of a node at each edge between stages, at the most (`Crossing`)."""
        nodes = [[self._kinds.node[group[0]] for group in groups] for groups in pipelines]
        edges = zip(*map(itertools.pairwise, nodes), strict=True)
        return tuple([_most_at_once([pair for pair in edge if pair[0] != pair[1]]) for edge in edges])


def _most_at_once(pairs: Sequence[tuple[int, int]]) -> int:
    """Return how many messages between nodes leave one of them, or come to it, at the most; 1 if there are none."""
    return max([1, *(count for ends in zip(*pairs, strict=True) for count in Counter(ends).values())])
