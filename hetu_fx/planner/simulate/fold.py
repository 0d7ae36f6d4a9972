"""Pipelines that do the same at the same time, simulated as one.

Pipelines are alike if their stages are, their rows are, and each of their units is (nodes, and whatever else devices
share links of: ports, racks): a unit is like another if pipelines that are alike have the same devices there. Whoever
is alike stays so whatever happens, as links are shared by one fair rule. So one of them stands for all, and wants so
much of a unit's link as all of them do there, on average over units that are alike (an equitable partition of devices
and units). A ring over all pipelines wants of a link what it wants of the busiest that is like it. That is the one
place where a fold may differ from the whole: where a device's neighbours in the ring stand on its own node and those of
another, like it, do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.topology import Place
from hetu_fx.planner.price.alike import firsts, shape
from hetu_fx.planner.price.link_load import Resource
from hetu_fx.plans.plan import Plan

Loads = Mapping[Resource, float]
Folding = Callable[[Loads], Loads]
"""What the loads of links come to for those that a job stands for."""


def unfold(loads: Loads) -> Loads:
    """Return the loads of a job that stands for itself alone."""
    return loads


@dataclass(frozen=True)
class Fold:
    """Which pipelines stand for others.

    Attributes:
        like: for every pipeline the first one that is like it.
        unit_like: for every unit the first one that is like it.
        device_like: for every device that which stands at its place of the pipeline that its own is like.
        link_units: what has a link, by the link's name.
    """

    like: tuple[int, ...]
    unit_like: Mapping[Place, Place]
    device_like: Mapping[int, int]
    link_units: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan, rows: Sequence[int], cluster: Cluster) -> Fold:
        """Return the fold of a plan whose pipelines have so many rows."""
        pipelines, units = _classes(plan, rows, cluster)
        pairs = zip(plan.pipelines, pipelines, strict=True)
        device_like = {
            rank: other
            for pipeline, like in pairs
            for rank, other in zip(pipeline.devices, plan.pipelines[like].devices, strict=True)
        }
        return cls(pipelines, units, device_like, cluster.link_units)

    def of_pipeline(self, number: int) -> Folding:
        """Return what loads of one of these come to, with those of all pipelines that are like it."""
        count, alike = self.like.count(number), Counter(self.unit_like.values())

        def folded(loads: Loads) -> Loads:
            total: dict[Resource, float] = {}
            for resource, load in loads.items():
                unit = self._unit_like(resource)
                key = resource if unit is None else (resource[0], unit[1])
                whole = load if unit is None else load * count / alike[unit]
                total[key] = total.get(key, 0.0) + whole
            return total

        return folded

    def of_all(self, loads: Loads) -> Loads:
        """Return what loads of all pipelines come to."""
        most: dict[Resource, float] = {}
        for resource, load in loads.items():
            unit = self._unit_like(resource)
            key = resource[0], self.device_like[resource[1]] if unit is None else unit[1]
            most[key] = max(most.get(key, 0.0), load)
        return most

    def _unit_like(self, resource: Resource) -> Place | None:
        """Return the first unit that is like the one whose link this is; None for what a device has for itself."""
        name, number = resource
        return self.unit_like.get((self.link_units.get(name, ""), number))


def _classes(plan: Plan, rows: Sequence[int], cluster: Cluster) -> tuple[tuple[int, ...], Mapping[Place, Place]]:
    """Return for every pipeline, and for every unit, the first that is like it: as many as tell each other apart."""
    places = [[cluster.shared_units(rank) for rank in pipeline.devices] for pipeline in plan.pipelines]
    shapes = firsts(shape(p, count, cluster) for p, count in zip(plan.pipelines, rows, strict=True))
    pipelines, known = shapes, 0
    units: dict[Place, Place] = {unit: (unit[0], -1) for own in places for found in own for unit in found}
    while len({*pipelines}) + len({*units.values()}) > known:
        known = len({*pipelines}) + len({*units.values()})
        inside: dict[Place, list[tuple[int, int]]] = {unit: [] for unit in units}
        for like, own in zip(pipelines, places, strict=True):
            for slot, found in enumerate(own):
                for unit in found:
                    inside[unit].append((like, slot))
        numbers = firsts((unit[0], tuple(sorted(found))) for unit, found in inside.items())
        names = list(inside)
        units = {unit: names[number] for unit, number in zip(names, numbers, strict=True)}
        pipelines = firsts((shape, _seen(own, units)) for shape, own in zip(shapes, places, strict=True))
    return pipelines, units


def _seen(places: Sequence[Sequence[Place]], units: Mapping[Place, Place]) -> Hashable:
    """Return what a pipeline knows of the units of its devices: what they are like, and which are the same."""
    numbers: dict[Place, int] = {}
    return tuple([(units[unit], numbers.setdefault(unit, len(numbers))) for found in places for unit in found])
