"""How fast each device of a job is on a model's own blocks: all run them at once, as they do in training.

Products of matrices tell how fast devices are, one beside another. What a model makes of a device they do not tell: how
wide its products are, what ops between them move, what running an op takes. Nor does one device alone tell what it is
among others that share its processor and its memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.measure.block_times import BlockShard, check_measurable, make_block_shard, time_shard
from hetu_fx.planner.measure.fit import counted_seconds, distinct_blocks
from hetu_fx.planner.values.program import ProgramCosts

SECONDS = 3.0
"""How long devices run blocks: several periods of a quota, and many runs of a block."""

WINDOWS = 5
"""Into so many parts that time is cut."""

MOST_ROWS = 4
"""Rows of a run: what an op takes besides its work counts as little as in training."""

FULL_TOKENS = 512
"""Of shorter sequences a run has more rows, up to so many tokens: products of fewer take longer for each of them."""


@dataclass(frozen=True, eq=False)
class OwnBlocks:
    """The distinct blocks of a model, each whole, ready to run on this process's device.

    Attributes:
        costs: of the program.
        blocks: one of each kind with its inputs, and how many there are.
        rows: of the inputs.
    """

    costs: ProgramCosts
    blocks: tuple[tuple[BlockShard, Sequence[Tensor], int], ...]
    rows: int

    @classmethod
    def of(cls, program: CapturedProgram, costs: ProgramCosts, place: torch.device, world_size: int) -> OwnBlocks:
        """Make them ready, with about as many rows as each of `world_size` devices has.

        Raises `ProfileError` where the model has none, or they cannot be run apart.
        """
        check_measurable(costs, program.program, place)
        rows = max(1, min(most_rows(program.length), costs.rows // world_size))
        shards = [
            (make_block_shard(program.program, block, 1, place), count) for block, count in distinct_blocks(costs)
        ]
        ready = tuple((shard, shard.inputs(program.length or 1, place, rows=rows), count) for shard, count in shards)
        return cls(costs, ready, rows)

    def speed_up(self, cluster: Cluster, rank: int, seconds: float = SECONDS) -> float:
        """Return how many times as fast this device is as the cluster says; takes about so many seconds, on any device.

        The median of means is taken: a mean has what a quota withholds, and the median leaves out what disturbs. The
        first window is not counted: it warms up, and uses up what quota was saved before.
        """
        _, *means = [self._mean_seconds(seconds / WINDOWS) for _ in range(1 + WINDOWS)]
        return counted_seconds(self.costs, rank, cluster, self.rows) / median(means)

    def _mean_seconds(self, seconds: float) -> float:
        """Return what all blocks of the model take forward and backward, on the average over so many seconds."""
        start, passes = time.perf_counter(), list[float]()
        while not passes or time.perf_counter() - start < seconds:
            passes.append(sum(time_shard(shard, inputs, count) for shard, inputs, count in self.blocks))
        return fmean(passes)


def most_rows(length: int) -> int:
    """Return the rows of a run at the most, of sequences of so many tokens; 0: rows have none."""
    return max(MOST_ROWS, math.ceil(FULL_TOKENS / length)) if length else MOST_ROWS


def measure_on_blocks(blocks: OwnBlocks, cluster: Cluster, table: GroupTable, seconds: float = SECONDS) -> Cluster:
    """Return the cluster as fast as its devices are on a model's blocks; collective, the same on every rank."""
    all_gather_object(table, None)  # all start together
    found = all_gather_object(table, raise_on_all_ranks(table, lambda: blocks.speed_up(cluster, table.rank, seconds)))
    return cluster.with_speeds({d.rank: d.flops_per_second * found[d.rank] for d in cluster.devices})
