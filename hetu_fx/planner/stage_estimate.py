"""What a group of devices takes for a range of blocks, whether its devices are alike or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import Piece
from hetu_fx.planner.price.stage import Line, compute_lines, forward_lines, tensor_parallel_lines
from hetu_fx.planner.price.step import update_line
from hetu_fx.planner.search.replica import Holding, StageEstimate
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Stage


def stage_estimate(
    stage: Stage, start: int, stop: int, costs: ProgramCosts, cluster: Cluster, memory: Mapping[int, int]
) -> StageEstimate:
    """Return what the blocks [start, stop) take on a tensor parallel stage, without what is handed over.

    Of devices with equal shares, that with the least memory stands for all.

    Args:
        stage: its devices and ratios; other fields are left out of account.
        start: first block.
        stop: after the last block.
        costs: of the program.
        cluster: has the stage's devices, and the fastest of their kinds, by which overheads are counted.
        memory: usable bytes by rank.
    """
    parts, count = costs.stage(start, stop), len(stage.devices)
    again = costs.again(replace(stage, blocks=None, recompute=stop - start), start)
    seconds = reduce(Line.upper, compute_lines(stage, parts, cluster))
    pairs = list(zip(stage.devices, stage.work_shares, strict=True))
    least = {share: min(memory[rank] for rank, other in pairs if other == share) for _, share in pairs}
    return StageEstimate(
        seconds=sum(tensor_parallel_lines(stage, parts, cluster), seconds),
        again=reduce(Line.upper, forward_lines(compute_lines(stage, again, cluster))),
        holdings=tuple(Holding(0, room, Piece(costs, start, stop, share, count)) for share, room in least.items()),
        update=reduce(
            Line.upper,
            (update_line(parts.parameter_bytes_at(share), cluster.device(rank)) for rank, share in pairs),
        ),
    )
