"""Every plan that there is, for a few devices: what searches are measured against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.search.device_orders import compositions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage


def all_plans(costs: ProgramCosts, cluster: Cluster, micro_batches: tuple[int, ...]) -> Iterator[Plan]:
    """Yield every plan over any devices in any order, with any ratios, blocks, rows and micro-batches."""
    for size in range(1, len(cluster.ranks) + 1):
        for order in permutations(cluster.ranks, size):
            for replicas in compositions(size, size, size):
                for rows in compositions(costs.rows, costs.rows, len(replicas)):
                    if len(rows) == len(replicas):
                        yield from _plans_of(order, replicas, rows, costs, micro_batches)


def _plans_of(
    order: tuple[int, ...],
    replicas: tuple[int, ...],
    rows: tuple[int, ...],
    costs: ProgramCosts,
    micro_batches: tuple[int, ...],
) -> Iterator[Plan]:
    choices, start = [], 0
    for size, count in zip(replicas, rows, strict=True):
        choices.append(list(_pipelines_of(order[start : start + size], count, costs, micro_batches)))
        start += size
    for pipelines in product(*choices):
        yield Plan(pipelines)


def _pipelines_of(
    devices: tuple[int, ...], rows: int, costs: ProgramCosts, micro_batches: tuple[int, ...]
) -> Iterator[Pipeline]:
    for groups in compositions(len(devices), costs.units, costs.num_blocks):
        for blocks in compositions(costs.num_blocks, costs.num_blocks, len(groups)):
            if len(blocks) == len(groups):
                starts = [sum(groups[:i]) for i in range(len(groups))]
                parts = [devices[s : s + n] for s, n in zip(starts, groups, strict=True)]
                ratios = [[r for r in compositions(costs.units, costs.units, n) if len(r) == n] for n in groups]
                for chosen, count in product(product(*ratios), micro_batches):
                    stages = zip(parts, chosen, blocks, strict=True)
                    yield Pipeline(tuple(Stage(d, r if len(d) > 1 else (), b) for d, r, b in stages), rows, count)
