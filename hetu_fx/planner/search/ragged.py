"""Plans for nodes of unequal sizes: made as if all nodes of a kind were full, and mended for what these lack.

Where a device of a node is lost, or kept for something else, no equal groups fit all that are left. A plan for full
nodes goes on without it (`search.mending`): its group falls into smaller ones, whose stages have fewer blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster, Device
from hetu_fx.planner.search.device_orders import alike_in, ranks_by_node
from hetu_fx.planner.search.homogeneous import candidates
from hetu_fx.planner.search.mending import best_mended
from hetu_fx.planner.search.problem import Candidates, Problem, Search

MOST_LACKING = 0.25
"""Of the devices of a kind, so large a share may be lacking in nodes that are taken for full."""


def lacking(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices that nodes have less than the largest one of their kind, where these are few; new ranks."""
    ranks = itertools.count(max(cluster.ranks) + 1)
    return tuple(replace(one, rank=next(ranks)) for one in _copied(cluster))


def _copied(cluster: Cluster) -> Iterator[Device]:
    """Yield a device of a node as often as one like it is lacking there."""
    for alike in alike_in(cluster):
        nodes = list(ranks_by_node(alike.devices, cluster).values())
        most = max(map(len, nodes))
        if most * len(nodes) - len(alike.devices) <= MOST_LACKING * len(alike.devices):
            for found in nodes:
                yield from itertools.repeat(cluster.device(found[0]), most - len(found))


def _find(problem: Problem) -> Candidates:
    added = lacking(problem.cluster)
    if not added:
        return {}
    problem.tell(f"ragged: as if there were {len(added)} devices more")
    cluster = replace(problem.cluster, devices=(*problem.cluster.devices, *added))
    whole = replace(problem, cluster=cluster)
    even = sorted(candidates(whole), key=lambda one: one.seconds)
    return best_mended(problem, whole, even, [device.rank for device in added])


RAGGED = Search(
    name="ragged",
    applies="nodes of a kind have unlike numbers of devices: plans for full nodes, without what is lacking",
    lacks=lambda problem: "" if lacking(problem.cluster) else "all nodes of a kind have as many devices",
    find=_find,
)
