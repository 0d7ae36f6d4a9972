"""What HeteroAuto plans for, of a profile and a cluster.

Seconds of a layer come from measured times if there are some of every kind, else from the cost model, so that kinds are
compared by figures of one source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster, Device, Link
from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.device_orders import Alike, alike_in, ranks_by_node
from hetu_fx.planner.search.heteroauto.problem import ChipKind, EndCosts, Freedom, HeteroProblem, Layer
from hetu_fx.planner.search.malleus.adapter import degrees, layer_seconds
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.part_costs import PartCosts

_FREE_KINDS = 4  # where there are more, groups of all kinds have one size


class HeteroProblems:
    """What HeteroAuto plans for with each number of replicas and micro-batches; kinds are worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._alike = problem, alike_in(problem.cluster)
        self._known = _of_one_source(problem)
        self._block = _largest_block(problem)
        self._kinds: dict[int, tuple[ChipKind, ...]] = {}

    def of(self, replicas: int, micro_batches: int, margin: float = 1.0) -> HeteroProblem:
        """Return the problem in which each replica has so many micro-batches, within a part of the memory.

        Raises `PlanError` where nothing is known of groups that some kind can form.
        """
        costs, cluster, options = self._problem.costs, self._problem.cluster, self._problem.options
        rows = math.ceil(costs.rows / (replicas * micro_batches))
        return HeteroProblem(
            kinds=tuple(replace(kind, memory_bytes=margin * kind.memory_bytes) for kind in self._kinds_for(rows)),
            num_layers=costs.num_blocks,
            num_micro_batches=replicas * micro_batches,
            between=_link(cluster, cluster.devices),
            boundary_bytes=rows * max(costs.boundary_bytes, default=0.0),
            before=_edge(costs.before, self._block, cluster),
            after=_edge(costs.after, self._block, cluster),
            replicas=(replicas,),
            schedule=options.schedule,
            zero=options.zero,
            freedom=Freedom(recompute=options.recompute, degree_per_kind=len(self._alike) <= _FREE_KINDS),
            state=costs.state,
        )

    def _kinds_for(self, rows: int) -> tuple[ChipKind, ...]:
        """Return the kinds with what micro-batches of so many rows cost."""
        if rows not in self._kinds:
            self._kinds[rows] = tuple(_kind(self._known, alike, rows) for alike in self._alike)
        return self._kinds[rows]


def _of_one_source(problem: Problem) -> Problem:
    """Return the problem without figures that not all kinds have: alpha says nothing of one kind over another."""
    profile = replace(problem.profile, alpha=())
    if not all(profile.block_times(device.kind) for device in problem.cluster.devices):
        profile = replace(profile, times=())
    return replace(problem, profile=profile)


def _kind(problem: Problem, alike: Alike, rows: int) -> ChipKind:
    cluster = replace(problem.cluster, devices=alike.devices)
    own = replace(problem, cluster=cluster)
    seconds = {size: alike.one.rate * layer_seconds(own, size, rows) for size in degrees(own)}
    return ChipKind(
        name=alike.name,
        nodes=tuple(map(len, ranks_by_node(alike.devices, problem.cluster).values())),
        memory_bytes=alike.memory_bytes * problem.options.memory_fraction,
        layers={size: _layer(problem, size, rows, took) for size, took in seconds.items() if took < math.inf},
        inside=problem.cluster.intra.between(*alike.devices),
        across=_link(problem.cluster, alike.devices),
        update_seconds_per_byte=optimizer_seconds(1.0, alike.one),
    )


def _layer(problem: Problem, size: int, rows: int, seconds: float) -> Layer:
    block, forward = _largest_block(problem), seconds / FORWARD_AND_BACKWARD
    return Layer(
        forward_seconds=forward,
        backward_seconds=seconds - forward,
        parameter_bytes=block.parameter_bytes_at(1 / size),
        kept_bytes=rows * block.activation_bytes_at(1 / size),
        input_bytes=rows * max(problem.costs.boundary_bytes, default=0.0),
    )


def _largest_block(problem: Problem) -> PartCosts:
    return max(problem.costs.blocks, key=lambda block: block.parameter_bytes + block.activation_bytes)


def _edge(part: PartCosts, block: PartCosts, cluster: Cluster) -> EndCosts:
    """Return what stands before or after the blocks, in blocks' worth, on the mean device."""
    flops_per_byte = fmean(device.flops_per_byte for device in cluster.devices)
    return EndCosts(
        work=_share(*(one.flops + one.traffic_bytes * flops_per_byte for one in (part, block))),
        parameters=_share(part.parameter_bytes, block.parameter_bytes),
        kept=_share(part.activation_bytes, block.activation_bytes),
    )


def _share(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0


def _link(cluster: Cluster, devices: Sequence[Device]) -> Link:
    """Return the slowest link that these devices have to use between them."""
    return (cluster.inter if len({device.node for device in devices}) > 1 else cluster.intra).between(*devices)
