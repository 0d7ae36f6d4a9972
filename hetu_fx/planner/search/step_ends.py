"""What a step takes besides its pipelines, as searches estimate it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE, cheapest_ring_cost
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.replica import Replica, remaining_after
from hetu_fx.planner.values.line import Line, uppermost
from hetu_fx.planner.values.program import ProgramCosts

_ROUNDED = 1 - 1e-9  # so much of a bound is one however it is rounded


Held = tuple[tuple[int, frozenset[int]], ...]
"""For each stage of equal pipelines the block at which it stops, and the nodes that hold it."""

Links = tuple[tuple[tuple[int, float], ...], ...]
"""Of links of nodes, whichever differ: for some blocks, how long gradients of all before them keep the link busy."""


@dataclass(frozen=True, slots=True)
class EndEstimate:
    """What a step takes besides its pipelines.

    Attributes:
        ring: gradients home, as the devices of a stage take.
        links: the same as links of nodes take, block by block.
        gather: parameters from home.
        update: of these.
        pieces: in how many of them gradients go round.
    """

    ring: float = 0.0
    links: Links = ()
    gather: float = 0.0
    update: float = 0.0
    pieces: int = 1

    @property
    def gradients(self) -> float:
        """Return for how long gradients travel."""
        return max([self.ring, *(busy[-1][1] for busy in self.links)])

    def late(self, replica: Replica) -> tuple[Line, ...]:
        """Return for how long gradients of such pipelines travel after these, by the rows of a micro-batch."""
        ends = ((seconds, replica.left(stop)) for busy in self.links for stop, seconds in busy)
        return uppermost([*replica.shown(self.ring), *(remaining_after(*pair) for pair in ends)])

    def seconds(self, late: float) -> float:
        """Return it where gradients travel for so long after all pipelines; a piece does in any case."""
        return self.gather + max(self.gradients / self.pieces, late) + self.update


NO_END = EndEstimate()


class StepEnds:
    """The ends of steps of a program on a cluster; each is worked out once."""

    def __init__(
        self, costs: ProgramCosts, cluster: Cluster, sharing: Callable[[tuple[int, ...]], tuple[int, ...]]
    ) -> None:
        """`sharing` tells the places in a stage's devices of those that hold the same of all weights as the first."""
        self._costs, self._cluster, self._sharing = costs, cluster, sharing
        self._node = {device.rank: cluster.node_of(device.rank) for device in cluster.devices}
        self._turn_seconds: dict[tuple[float, tuple[int, ...]], tuple[float, float, float]] = {}
        self._nodes: dict[tuple[int, ...], frozenset[int]] = {}

    def of(
        self,
        replicas: Iterable[Replica],
        firsts: Sequence[tuple[int, ...]],
        lasts: Sequence[tuple[int, ...]],
        zero: int,
        links: Links = (),
    ) -> EndEstimate:
        """Return what a step takes besides its pipelines, whose first and last stages are given.

        Devices that hold the same meet, one of each pipeline: those of a stage may be nearer than those of another.
        `links` is how long gradients keep those of nodes busy.
        """
        found = list(replicas)
        parameters = max(replica.parameter_bytes for replica in found)
        update = max(replica.update_seconds for replica in found)
        rings = dict.fromkeys(self._ring(stages) for stages in (firsts, lasts))
        pieces = max(1, *(count for replica in found for count in replica.blocks))
        turns = [self._turns(parameters, one, zero, pieces) for one in rings]
        gradients, gather = (max(column) for column in zip(*turns, strict=True))
        turn = max([0.0, *(busy[-1][1] for busy in links)])
        sums = self._costs.row_sums.seconds([devices[0] for devices in firsts], self._cluster)
        return EndEstimate(
            ring=gradients,
            links=links,
            gather=max(gather, turn if zero else 0.0) + sums,
            update=update / max(map(len, rings)) if zero else update,
            pieces=pieces,
        )

    def _ring(self, stages: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the devices of such stages, one of each pipeline, that hold the same as their first ones."""
        return tuple([devices[place] for devices in stages for place in self._sharing(devices)])

    def _turns(self, num_bytes: float, ring: tuple[int, ...], zero: int, pieces: int) -> tuple[float, float]:
        """Return (gradient sync, gather) seconds of so many pieces around a ring, a few of them at once."""
        key = num_bytes, ring
        if key not in self._turn_seconds:
            empty, full = (sync_seconds(size, ring, self._cluster, zero=1)[1] for size in (0.0, num_bytes))
            self._turn_seconds[key] = empty, full, cheapest_ring_cost(num_bytes, ring, self._cluster)
        empty, full, least = self._turn_seconds[key]
        turn = max((pieces * empty + full - empty) / min(pieces, BUCKETS_AT_ONCE), least)
        return (turn, turn) if zero else (2 * turn, 0.0)

    def held(self, pipelines: Sequence[Groups], replica: Replica) -> Held:
        """Return which nodes hold the stages of equal pipelines."""
        stops = itertools.accumulate(replica.blocks)
        nodes = (frozenset[int]().union(*map(self._nodes_of, stage)) for stage in zip(*pipelines, strict=True))
        return tuple(zip(stops, nodes, strict=True))

    def links(self, held: Sequence[Held], zero: int, *, others: int = 0) -> Links:
        """Return how long gradients keep links busy; `others`: on so many nodes more there is the same.

        Each of n nodes that hold the same sends, and gets, (n - 1) / n of it.
        """
        busy: dict[int, list[tuple[int, float]]] = {}
        start = 0
        for stop in sorted({stop for own in held for stop, _ in own}):
            nodes = frozenset[int]().union(*(next(n for last, n in own if last >= stop) for own in held))
            count = len(nodes) + others
            size = self._costs.stage(start, stop).parameter_bytes * (1 - 1 / count) * (1 if zero else 2)
            for node in nodes if size else ():
                known = busy.setdefault(node, [])
                before = known[-1][1] if known else 0.0
                known.append((stop, before + size / self._cluster.inter.bytes_per_second))
            start = stop
        return tuple(dict.fromkeys(map(tuple, busy.values())))

    def least_turns(self, pipelines: Sequence[Groups]) -> tuple[float, float]:
        """Return for how long one turn of all parameters keeps the link of some node busy at least.

        Whatever the stages hold: alone, as far as none stands in one node only, and with other pipelines.
        """
        held = [frozenset[int]().union(*map(self._nodes_of, stage)) for stage in zip(*pipelines, strict=True)]
        least, size = min(map(len, held)), self._costs.between(0, self._costs.num_blocks).parameter_bytes
        each = size * _ROUNDED / len(frozenset[int]().union(*held)) / self._cluster.inter.bytes_per_second
        return each * (least - 1), each * least * least / (least + 1)

    def _nodes_of(self, group: tuple[int, ...]) -> frozenset[int]:
        if group not in self._nodes:
            self._nodes[group] = frozenset(self._node[rank] for rank in group)
        return self._nodes[group]
