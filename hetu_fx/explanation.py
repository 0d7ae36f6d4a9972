"""What a plan gives each device to do: its share, its blocks, its memory of the limit, how busy it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetu_fx.prediction import DeviceCost

if TYPE_CHECKING:
    from hetu_fx.plans import Plan

HEADER = ("device", "stage", "rows", "shard", "blocks", "memory MB", "busy")


def device_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield the cells of each device's row of the table, under `HEADER`; none for a plan without prediction.

    rows: its pipeline's share of the batch; shard: its share of what its stage cuts; memory: what it needs, of what
    it has; busy: the share of the step in which it does not wait for others.
    """
    costs = {} if plan.predicted is None else {device.rank: device for device in plan.predicted.devices}
    total = sum(pipeline.rows for pipeline in plan.pipelines)
    for i, j, stage in plan.stages:
        pipeline = plan.pipelines[i]
        for rank, ratio in zip(stage.devices, stage.ratios, strict=True):
            if rank in costs:
                blocks = "even" if stage.blocks is None else str(stage.blocks)
                shares = _percent(pipeline.rows / total), _percent(ratio / sum(stage.ratios))
                yield [str(rank), f"{i}.{j}", *shares, blocks, _memory(costs[rank]), _busy(costs[rank])]


def _memory(cost: DeviceCost) -> str:
    need = f"{cost.total_bytes / 1e6:.4g}"
    if cost.limit_bytes is None:
        return need
    return f"{need} of {cost.limit_bytes / 1e6:.4g} ({_percent(cost.total_bytes / cost.limit_bytes)})"


def _busy(cost: DeviceCost) -> str:
    total = cost.total_seconds
    return _percent(1 - dict(cost.seconds).get("idle", 0.0) / total) if total else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
