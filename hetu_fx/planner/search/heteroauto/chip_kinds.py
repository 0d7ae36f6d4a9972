"""What HeteroAuto plans for, of a profile and a cluster.

Seconds of a layer come from measured times if there are some of every kind, else from the cost model, so that kinds are
compared by figures of one source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster, Device, Link
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.device_orders import LikeDevices, devices_by_likeness, ranks_by_node
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer, SearchSpace
from hetu_fx.planner.search.malleus.adapter import degrees, layer_line
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts

_FREE_KINDS = 4  # where there are more, groups of all kinds have one size


class HeteroProblems:
    """What HeteroAuto plans for with each number of replicas and micro-batches."""

    def __init__(self, problem: Problem, known: dict[tuple[str, bool], ChipCosts] | None = None) -> None:
        """Kinds that are known from other parts of the cluster may be given, to which those of this one are added.

        Raises `PlanError` where nothing is known of groups that some kind can form.
        """
        costs, cluster = problem.costs, problem.cluster
        self._problem = problem
        asked, known, self._kinds = _of_one_source(problem), {} if known is None else known, list[ChipCosts]()
        for alike in devices_by_likeness(cluster):
            key = alike.name, bool(asked.profile.times)  # problems may differ in their clusters, and in what counts
            if key not in known:
                known[key] = ChipCosts.of(asked, alike)
            self._kinds.append(known[key])
        self._between = _link(cluster, cluster.devices)
        self._edges = [_edge(part, _largest_block(problem), cluster) for part in (costs.before, costs.after)]

    def of(self, replicas: int, micro_batches: int, margin: float = 1.0) -> HeteroProblem:
        """Return the problem in which each replica has so many micro-batches, within a part of the memory."""
        costs, options = self._problem.costs, self._problem.options
        rows = math.ceil(costs.rows / (replicas * micro_batches))
        return HeteroProblem(
            kinds=tuple(kind.at(rows, margin) for kind in self._kinds),
            num_layers=costs.num_blocks,
            num_micro_batches=replicas * micro_batches,
            between=self._between,
            boundary_bytes=rows * max(costs.boundary_bytes, default=0.0),
            before=self._edges[0],
            after=self._edges[1],
            replicas=(replicas,),
            schedule=options.schedule,
            zero=options.zero,
            freedom=SearchSpace(recompute=options.recompute, degree_per_kind=len(self._kinds) <= _FREE_KINDS),
            state=costs.state,
        )


def _of_one_source(problem: Problem) -> Problem:
    """Return the problem without figures that not all kinds have: alpha says nothing of one kind over another."""
    profile = replace(problem.profile, alpha=())
    if not all(profile.block_times(device.kind) for device in problem.cluster.devices):
        profile = replace(profile, times=())
    return replace(problem, profile=profile)


@dataclass(frozen=True)
class ChipCosts:
    """A kind of chips for micro-batches of one row, and what a layer takes by their rows, for each size of groups."""

    for_a_row: ChipKind
    lines: Mapping[int, Line]

    @classmethod
    def of(cls, problem: Problem, alike: LikeDevices) -> ChipCosts:
        """Return the kind of devices that are alike. Raises `PlanError` where nothing is known of groups of them."""
        own, rate = replace(problem, cluster=replace(problem.cluster, devices=alike.devices)), alike.one.rate
        found = [(size, layer_line(own, size)) for size in degrees(own)]
        lines = {size: Line(rate * line.fixed, rate * line.slope) for size, line in found if line.fixed < math.inf}
        kind = ChipKind(
            name=alike.name,
            nodes=tuple(map(len, ranks_by_node(alike.devices, problem.cluster).values())),
            memory_bytes=alike.memory_bytes * problem.options.memory_fraction,
            layers={size: _layer(problem, size, line) for size, line in lines.items()},
            inside=problem.cluster.intra.between(*alike.devices),
            across=_link(problem.cluster, alike.devices),
            update_seconds_per_byte=optimizer_seconds(1.0, alike.one),
        )
        return cls(kind, lines)

    def at(self, rows: int, margin: float) -> ChipKind:
        """Return the kind for micro-batches of so many rows, with a part of its memory."""
        layers = {size: _of_rows(layer, self.lines[size], rows) for size, layer in self.for_a_row.layers.items()}
        return replace(self.for_a_row, memory_bytes=margin * self.for_a_row.memory_bytes, layers=layers)


def _layer(problem: Problem, size: int, line: Line) -> Layer:
    """Return a layer on a group, for micro-batches of one row."""
    block, forward = _largest_block(problem), line(1) / FORWARD_AND_BACKWARD
    return Layer(
        forward_seconds=forward,
        backward_seconds=line(1) - forward,
        parameter_bytes=block.parameter_bytes_at(1 / size),
        kept_bytes=block.activation_bytes_at(1 / size),
        input_bytes=max(problem.costs.boundary_bytes, default=0.0),
    )


def _of_rows(layer: Layer, line: Line, rows: int) -> Layer:
    """Return a layer for micro-batches of so many rows instead of one."""
    forward = line(rows) / FORWARD_AND_BACKWARD
    kept, entering = rows * layer.kept_bytes, rows * layer.input_bytes
    return Layer(forward, line(rows) - forward, layer.parameter_bytes, kept, entering)


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
