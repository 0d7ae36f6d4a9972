"""What stages hand over between nodes, whose links the pipelines of a plan share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import Resource
from hetu_fx.plans.parts import PartedPipeline


@dataclass(frozen=True, slots=True)
class Crossing:
    """How many pipelines hand over to the same part through each link of a node: (part, node, direction)."""

    counts: Counter[tuple[int, int, str]]
    cluster: Cluster

    @classmethod
    def of(cls, pipelines: Iterable[PartedPipeline], cluster: Cluster) -> Crossing:
        """Count those of a plan."""
        found = (end for pipeline in pipelines for ends in _ends(pipeline, cluster) for end in ends)
        return cls(Counter(found), cluster)

    def beside(self, pipeline: PartedPipeline) -> tuple[int, ...]:
        """Return how many pipelines, it included, share a link at each of its edges; 1 within a node."""
        edges = _ends(pipeline, self.cluster)
        return tuple([max((self.counts[end] for end in ends), default=1) for ends in edges])


def _ends(pipeline: PartedPipeline, cluster: Cluster) -> list[tuple[tuple[int, int, str], ...]]:
    """Return the links of nodes that each edge between parts uses; none within a node."""
    nodes = [cluster.node_of(stage.devices[0]) for stage in pipeline.parts]
    return [
        ((index, here, "out"), (index, there, "in")) if here != there else ()
        for index, (here, there) in enumerate(pairwise(nodes))
    ]


def add_crossing(busy: dict[Resource, float], sender: int, receiver: int, num_bytes: float, cluster: Cluster) -> None:
    """Add for how long bytes that go from one node to another keep the links busy that these share."""
    for end in cluster.ends(sender, receiver):
        busy[end.key] = busy.get(end.key, 0.0) + num_bytes / end.bytes_per_second
