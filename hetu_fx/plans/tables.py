"""Plans as tables for people, within 80 columns: what is alike stands in one row, however many devices there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from hetu_fx.base.words import ranks_text, share_text
from hetu_fx.plans.alike import FEW_DEVICES, Alike, alike, busy_text, groups_of, idle_seconds, memory_text
from hetu_fx.plans.program import OpRegion
from hetu_fx.plans.stage import Pipeline, Stage, ratios_text
from hetu_fx.show.table import table_text

if TYPE_CHECKING:
    from hetu_fx.plans.plan import Plan

PLAN_HEADER = ("pipeline", "rows", "micro-batches", "stage", "devices", "ratios", "blocks")
PROGRAM_HEADER = ("ops", "cut on", "ratios", "gradients")
HEADER = ("device", "pipeline", "stage", "rows", "shard", "memory", "busy")

_FEW_GROUPS = 2  # of like stages, whose devices are written out
_FEW_RANKS = 4  # of a group
_LONG = 12  # letters of ratios that are all alike


def plan_table(plan: Plan) -> str:
    """Return the table of a plan's pipelines and stages; what is a pipeline's stands with its first stage."""
    return table_text(PLAN_HEADER, [_plan_row(found) for found in alike(plan)])


def program_text(plan: Plan) -> Iterator[str]:
    """Yield the table of a program: ops of each region, what they are cut on, how gradients of weights are made."""
    for *_, stage in plan.stages:
        if stage.program:
            rows = [_region_row(region, stage) for region in stage.program]
            yield f"program, op by op; the first region that an op matches holds\n{table_text(PROGRAM_HEADER, rows)}"


def _region_row(region: OpRegion, stage: Stage) -> list[str]:
    ratios = ratios_text(region.ratios or stage.ratios) if region.is_cut else ""
    return [region.ops, region.split, ratios, "from factors" if region.factors else ""]


def _plan_row(found: Alike) -> list[str]:
    one, stage, (pipelines, positions) = found.pipeline, found.stage, found.place
    head = [pipelines, f"{one.share}{limit_text(one)}", str(one.micro_batches)]
    cells = [positions, _groups_text(found.groups), _ratios(stage) + _context(stage), blocks_text(stage)]
    return [*(head if found.positions.start == 0 else ["", "", ""]), *cells]


def _groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    """Return the devices of like stages: `0,1 | 2,3`, of many `0-511 by 2`."""
    if len(groups) <= _FEW_GROUPS:
        return " | ".join(map(_group_text, groups))
    return f"{ranks_text(rank for group in groups for rank in group)} by {len(groups[0])}"


def _group_text(group: tuple[int, ...]) -> str:
    is_long = len(group) > _FEW_RANKS and group == tuple(sorted(group))
    return ranks_text(group) if is_long else ",".join(map(str, group))


def _ratios(stage: Stage) -> str:
    text = ratios_text(stage.ratios)
    return "even" if len(text) > _LONG and len(set(stage.ratios)) == 1 else text


def _context(stage: Stage) -> str:
    shared = " context" if stage.shares_sequence else ""
    return f"{shared} {ratios_text(stage.context_ratios)}" if stage.is_grid else shared


def blocks_text(stage: Stage) -> str:
    """Return how many blocks a stage has, and recomputes, and in which dtype: `12, recompute 5`."""
    blocks = "even" if stage.blocks is None else str(stage.blocks)
    return ", ".join(filter(None, [blocks, stage.manner_text]))


def limit_text(pipeline: Pipeline) -> str:
    """Return what a pipeline says of lengths, after a comma; empty if it says nothing."""
    return "" if pipeline.max_length is None else f", up to {pipeline.max_length} tokens"


def left_out_text(plan: Plan, devices: Iterable[int] = ()) -> Iterator[str]:
    """Yield a line on the devices that a plan does not use, of some and of those that it was made for, if there are."""
    known = {*devices, *(() if plan.predicted is None else plan.predicted.left_out)}
    idle = known - {*plan.devices}
    if idle:
        yield f"left out: {len(idle)} of {len(known | {*plan.devices})} devices, {ranks_text(idle)}"


def device_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield what devices do, under `HEADER`, a row for those that do the same; none for a plan without prediction.

    rows: its pipeline's share of the batch; shard: its share of what its stage cuts; memory: what it needs, of what
    it has, of several the most; busy: the share of the step in which it does not wait for others.
    """
    for group in groups_of(plan):
        if group.costs:
            cells = [share_text(group.rows), share_text(group.shard), memory_text(group.most), busy_text(group.costs)]
            yield [ranks_text(group.ranks), *group.place, *cells]


def busiest(plan: Plan) -> list[int]:
    """Return of each row of a plan of many devices the one that waits least; none for a short plan."""
    if plan.predicted is None or len(plan.devices) <= FEW_DEVICES:
        return []
    told = (group.costs for group in groups_of(plan) if group.costs)
    return [min(costs, key=lambda cost: (idle_seconds(cost), cost.rank)).rank for costs in told]


def rows_text(pipeline: Pipeline) -> str:
    """Return a pipeline's share and parts: `3 rows in 2`."""
    noun = "row" if pipeline.share == 1 else "rows"
    parts = f" in {pipeline.micro_batches}" if pipeline.micro_batches > 1 else ""
    return f"{pipeline.share} {noun}{parts}{limit_text(pipeline)}"


def short_text(plan: Plan) -> str:
    """Return the plan on a line: its summary, or of many devices what its pipelines and stages are alike in.

    `2 x 1 row in 32: 3 x [2 devices]x1 > [2 devices]x4` are two pipelines of four stages each.
    """
    if len(plan.devices) <= FEW_DEVICES:
        return plan.summary()
    by_pipeline = groupby(alike(plan), lambda found: found.numbers)
    return " | ".join(_short_pipeline(list(found)) for _, found in by_pipeline)


def _short_pipeline(found: Sequence[Alike]) -> str:
    stages = " > ".join(_times(len(one.positions), _short_stage(one.stage)) for one in found)
    return f"{_times(len(found[0].numbers), rows_text(found[0].pipeline))}: {stages}"


def _short_stage(stage: Stage) -> str:
    devices = "1 device" if len(stage.devices) == 1 else f"{len(stage.devices)} devices"
    ratios = "" if len(set(stage.ratios)) <= 1 else f" {ratios_text(stage.ratios)}"
    return f"[{devices}{ratios}{_context(stage)}]x{blocks_text(stage)}"


def _times(count: int, text: str) -> str:
    return text if count == 1 else f"{count} x {text}"
