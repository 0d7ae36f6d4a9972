"""Pipelines that do the same at the same time, simulated as one.

Pipelines are alike if their stages are, their rows are, and each of their nodes is: a node is like another if pipelines
that are alike have the same devices there. Whoever is alike stays so whatever happens, as links are shared by one fair
rule. So one of them stands for all, and wants so much of a node's link as all of them do there, on average over nodes
that are alike (an equitable partition of devices and nodes). A ring over all pipelines wants of a link what it wants of
the busiest that is like it. That is the one place where a fold may differ from the whole: where a device's neighbours
in the ring stand on its own node and those of another, like it, do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.links import Resource
from hetu_fx.plans.plan import Pipeline, Plan

Loads = Mapping[Resource, float]
Folding = Callable[[Loads], Loads]
"""What the loads of links come to for those that a job stands for."""

_OF_NODES = ("out of node", "into node")


def unfolded(loads: Loads) -> Loads:
    """Return the loads of a job that stands for itself alone."""
    return loads


@dataclass(frozen=True)
class Fold:
    """Which pipelines stand for others.

    Attributes:
        like: for every pipeline the first one that is like it.
        node_like: for every node the first one that is like it.
        device_like: for every device that which stands at its place of the pipeline that its own is like.
    """

    like: tuple[int, ...]
    node_like: Mapping[int, int]
    device_like: Mapping[int, int]

    @classmethod
    def of(cls, plan: Plan, rows: Sequence[int], cluster: Cluster) -> Fold:
        """Return the fold of a plan whose pipelines have so many rows."""
        pipelines, nodes = _classes(plan, rows, cluster)
        pairs = zip(plan.pipelines, pipelines, strict=True)
        device_like = {
            rank: other
            for pipeline, like in pairs
            for rank, other in zip(pipeline.devices, plan.pipelines[like].devices, strict=True)
        }
        return cls(pipelines, nodes, device_like)

    @property
    def first(self) -> tuple[int, ...]:
        """Return the pipelines that stand for all."""
        return tuple(dict.fromkeys(self.like))

    def of_pipeline(self, number: int) -> Folding:
        """Return what loads of one of these come to, with those of all pipelines that are like it."""
        count, nodes = self.like.count(number), Counter(self.node_like.values())

        def folded(loads: Loads) -> Loads:
            total: dict[Resource, float] = {}
            for (name, where), load in loads.items():
                if name in _OF_NODES:
                    where = self.node_like[where]
                    load *= count / nodes[where]
                total[name, where] = total.get((name, where), 0.0) + load
            return total

        return folded

    def of_all(self, loads: Loads) -> Loads:
        """Return what loads of all pipelines come to."""
        most: dict[Resource, float] = {}
        for (name, where), load in loads.items():
            key = name, (self.node_like if name in _OF_NODES else self.device_like)[where]
            most[key] = max(most.get(key, 0.0), load)
        return most


def _classes(plan: Plan, rows: Sequence[int], cluster: Cluster) -> tuple[tuple[int, ...], Mapping[int, int]]:
    """Return for every pipeline, and for every node, the first that is like it: as many as tell each other apart."""
    places = [[cluster.node_of(rank) for rank in pipeline.devices] for pipeline in plan.pipelines]
    shapes = _firsts(_shape(p, count, cluster) for p, count in zip(plan.pipelines, rows, strict=True))
    pipelines, nodes, known = shapes, dict.fromkeys((n for own in places for n in own), 0), 0
    while len({*pipelines}) + len({*nodes.values()}) > known:
        known = len({*pipelines}) + len({*nodes.values()})
        on_node: dict[int, list[tuple[int, int]]] = {node: [] for node in nodes}
        for like, own in zip(pipelines, places, strict=True):
            for slot, node in enumerate(own):
                on_node[node].append((like, slot))
        numbers = _firsts(tuple(sorted(found)) for found in on_node.values())
        names = list(on_node)
        nodes = {node: names[number] for node, number in zip(names, numbers, strict=True)}
        pipelines = _firsts((shape, _seen(own, nodes)) for shape, own in zip(shapes, places, strict=True))
    return pipelines, nodes


def _seen(places: Sequence[int], nodes: Mapping[int, int]) -> Hashable:
    """Return what a pipeline knows of the nodes of its devices: what they are like, and which are the same."""
    numbers: dict[int, int] = {}
    return tuple([(nodes[node], numbers.setdefault(node, len(numbers))) for node in places])


def _shape(pipeline: Pipeline, rows: int, cluster: Cluster) -> Hashable:
    stages = tuple([replace(stage, devices=tuple(range(len(stage.devices)))) for stage in pipeline.stages])
    devices = tuple([replace(cluster.device(rank), rank=0, node="") for rank in pipeline.devices])
    return stages, devices, rows, pipeline.micro_batches


def _firsts(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Return for each value the place of the first that equals it."""
    first: dict[Hashable, int] = {}
    return tuple([first.setdefault(value, place) for place, value in enumerate(values)])
