"""What equal pipelines take and hold at the least, known before any of them is built.

With S stages of n devices each, and up to m micro-batches, a pipeline of x rows takes no less than its work on its
fastest devices with the ramp of the pipeline, and its first stage holds parameters, gradients and, of the min(m, S)
micro-batches that are under way there, what enters each block or what a block keeps, whichever is less:

    seconds >= work(x) / (S n speed) (m + S - 1) / m                                                            (1)
    seconds >= work of the least x and blocks of a stage / (n speed of the slowest)                             (1')
    bytes >= 2 P / (S g) + min(m, S) ceil(x / m) blocks / S min(boundary, kept / g) / c                          (2)

for groups of g devices of which c share the sequence. Stages are equal, so that in (1') the slowest device counts; it
is no faster than that of as many of the fastest as the plan has. Searches leave out what cannot fit, or cannot be near
the best.
"""

from __future__ import annotations

import math

from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.search.problem import Problem


class PlanBounds:
    """The bounds of a problem's plans."""

    def __init__(self, problem: Problem) -> None:
        costs, devices = problem.costs, problem.cluster.devices
        self._costs, self._most_counted = costs, problem.options.micro_batches[-1]
        self._speeds = sorted((device.speed for device in devices), reverse=True)
        self._room = problem.options.memory_fraction * max(device.memory_bytes for device in devices)
        self._least_flops = min((block.flops for block in costs.blocks), default=0.0)
        self._entering = min(costs.boundary_bytes, default=0.0)  # a block, per row
        self._kept = min((block.activation_bytes for block in costs.blocks), default=0.0)

    def seconds(self, pipelines: int, stages: int, size: int) -> float:
        """Return (1) or (1'), whichever is more, for the rows of a step over so many pipelines."""
        rows, costs = math.ceil(self._costs.rows / pipelines), self._costs
        work, speeds = FORWARD_AND_BACKWARD * costs.whole.flops * rows, self._speeds
        ramped = work / (stages * size * speeds[0]) * (1 + (stages - 1) / self._most_micro_batches(rows))
        least = FORWARD_AND_BACKWARD * self._least_flops * (costs.num_blocks // stages) * (costs.rows // pipelines)
        return max(ramped, least / (size * speeds[min(len(speeds), pipelines * stages * size) - 1]))

    def fits(self, pipelines: int, stages: int, group: int, context: int) -> bool:
        """Tell whether (2) fits the largest device."""
        costs, rows = self._costs, math.ceil(self._costs.rows / pipelines)
        count = self._most_micro_batches(rows)
        each = min(self._entering, self._kept / group) * math.ceil(rows / count) / context
        under_way = min(count, stages) * costs.num_blocks / stages * each
        return 2 * costs.for_group(group).whole.parameter_bytes_at(1 / group) / stages + under_way <= self._room

    def _most_micro_batches(self, rows: int) -> int:
        return min(rows, self._most_counted)
