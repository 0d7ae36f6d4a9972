"""Pipelines that are priced as one: what they run, and on what, is the same but for the names of devices."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.topology import Place
from hetu_fx.plans.plan import Pipeline, Plan, Stage, pipeline_rows


def alike(plan: Plan, rows: int, cluster: Cluster) -> tuple[int, ...]:
    """Return for each pipeline of a plan, for a step of so many rows, the first that is like it.

    Their devices are alike, and share nodes, and whatever else has a link, with each other in the same way.
    """
    pairs = zip(plan.pipelines, pipeline_rows(rows, plan), strict=True)
    return firsts((shape(pipeline, own, cluster), _together(pipeline, cluster)) for pipeline, own in pairs)


def shape(pipeline: Pipeline, rows: int, cluster: Cluster) -> Hashable:
    """Return what a pipeline of so many rows runs, and what its devices are, wherever they stand."""
    stages = tuple(map(_but_for_devices, pipeline.stages))
    return stages, tuple(map(cluster.likeness, pipeline.devices)), rows, pipeline.micro_batches


def _but_for_devices(stage: Stage) -> Hashable:
    count = len(stage.devices)
    shares = stage.ratios, stage.context, stage.context_ratios
    return count, *shares, stage.blocks, stage.recompute, stage.recompute_ops, stage.dtype


def _together(pipeline: Pipeline, cluster: Cluster) -> Hashable:
    """Return which of a pipeline's devices stand in the same units."""
    numbers: dict[Place, int] = {}
    units = map(cluster.shared_units, pipeline.devices)
    return tuple([numbers.setdefault(unit, len(numbers)) for found in units for unit in found])


def firsts(values: Iterable[Hashable]) -> tuple[int, ...]:
    """Return for each value the place of the first that equals it."""
    first: dict[Hashable, int] = {}
    return tuple([first.setdefault(value, place) for place, value in enumerate(values)])
