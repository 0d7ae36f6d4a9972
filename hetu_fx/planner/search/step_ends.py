"""What a step takes besides its pipelines, as searches estimate it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE, cheapest_ring_cost
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.planner.search.device_orders import Groups
from hetu_fx.planner.search.replica import Replica
from hetu_fx.planner.values.program import ProgramCosts

_ROUNDED = 1 - 1e-9  # so much of a bound is one however it is rounded


@dataclass(frozen=True, slots=True)
class EndEstimate:
    """What a step takes besides its pipelines: gradients home, in so many pieces, parameters from there, the update."""

    gradients: float = 0.0
    gather: float = 0.0
    update: float = 0.0
    pieces: int = 1

    def seconds(self, hidden: float) -> float:
        """Return it where gradients travel for so long beside the last backward; a piece does so after it."""
        return self.gather + max(self.gradients / self.pieces, self.gradients - hidden) + self.update


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
        last: int,
        zero: int,
        shared_bytes: float = 0.0,
    ) -> EndEstimate:
        """Return what a step takes besides its pipelines, whose first stages are given.

        `last` is the last device of the first pipeline, which may stand on another node than all first ones;
        `shared_bytes` is what one turn of all parameters sends through the link of a node.
        """
        found = list(replicas)
        parameters = max(replica.parameter_bytes for replica in found)
        update = max(replica.update_seconds for replica in found)
        ring = tuple([devices[place] for devices in firsts for place in self._sharing(devices)])
        pieces = max(1, *(stage.blocks or 0 for replica in found for stage in replica.pipeline.stages))
        is_near = self._node[last] == self._node[ring[0]]
        rings = [ring] if is_near else [ring, (last, *ring[1:])]
        turns = [self._turns(parameters, one, zero, pieces) for one in rings]
        gradients, gather = (max(column) for column in zip(*turns, strict=True))
        turn = shared_bytes / self._cluster.inter.bytes_per_second
        sums = self._costs.row_sums.seconds([devices[0] for devices in firsts], self._cluster)
        return EndEstimate(
            gradients=max(gradients, turn if zero else 2 * turn),
            gather=max(gather, turn if zero else 0.0) + sums,
            update=update / len(ring) if zero else update,
            pieces=pieces,
        )

    def _turns(self, num_bytes: float, ring: tuple[int, ...], zero: int, pieces: int) -> tuple[float, float]:
        """Return (gradient sync, gather) seconds of so many pieces around a ring, a few of them at once."""
        key = num_bytes, ring
        if key not in self._turn_seconds:
            empty, full = (sync_seconds(size, ring, self._cluster, zero=1)[1] for size in (0.0, num_bytes))
            self._turn_seconds[key] = empty, full, cheapest_ring_cost(num_bytes, ring, self._cluster)
        empty, full, least = self._turn_seconds[key]
        turn = max((pieces * empty + full - empty) / min(pieces, BUCKETS_AT_ONCE), least)
        return (turn, turn) if zero else (2 * turn, 0.0)

    def shared_bytes(self, pipelines: Sequence[Groups], replica: Replica, *, are_all: bool = True) -> float:
        """Return the most bytes of parameters that one turn sends through the link of a node; 0 within one node.

        Every node gets all that its devices hold of what others hold too. `are_all`: there are no other pipelines.
        """
        node_of, stages = self._node, range(len(pipelines[0]))
        held = [{node_of[rank] for groups in pipelines for rank in groups[stage]} for stage in stages]
        blocks = [stage.blocks or 0 for stage in replica.pipeline.stages]
        stops = list(itertools.accumulate(blocks))
        total: dict[int, float] = {}
        for nodes, count, stop in zip(held, blocks, stops, strict=True):
            if len(nodes) > 1 or not are_all:
                size = self._costs.stage(stop - count, stop).parameter_bytes
                for node in nodes:
                    total[node] = total.get(node, 0.0) + size
        return max(total.values(), default=0.0)

    def least_turns(self, pipelines: Sequence[Groups]) -> tuple[float, float]:
        """Return for how long one turn of all parameters keeps the link of some node busy at least.

        Whatever the stages hold: alone, as far as none stands in one node only, and with other pipelines.
        """
        held = [frozenset[int]().union(*map(self._nodes_of, stage)) for stage in zip(*pipelines, strict=True)]
        least, size = min(map(len, held)), self._costs.between(0, self._costs.num_blocks).parameter_bytes
        beside = least / len(frozenset[int]().union(*held)) * size * _ROUNDED / self._cluster.inter.bytes_per_second
        return beside if least > 1 else 0.0, beside

    def _nodes_of(self, group: tuple[int, ...]) -> frozenset[int]:
        if group not in self._nodes:
            self._nodes[group] = frozenset(self._node[rank] for rank in group)
        return self._nodes[group]
