"""Plans as tables for people, within 80 columns: what is alike stands in one row, however many devices there are.

Alike are stages that differ in their devices alone, and devices that do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hetu_fx.base.words import bytes_text, format_used_bytes, ranks_text, seconds_text, share_text
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.plans.stage import Pipeline, Stage, ratios_text
from hetu_fx.show.table import table_text

FEW_DEVICES = 8
"""Plans of so many devices are written out; of more, like stages that follow each other stand together too."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Stages that differ in their devices alone: some that follow each other, of some pipelines.

    Attributes:
        numbers: of the pipelines.
        pipeline: the first of them.
        positions: of the stages.
        groups: the devices of each stage, pipeline by pipeline.
    """

    numbers: tuple[int, ...]
    pipeline: Pipeline
    positions: range
    groups: tuple[tuple[int, ...], ...]

    @property
    def stage(self) -> Stage:
        """Return the first of the stages."""
        return self.pipeline.stages[self.positions.start]

    @property
    def place(self) -> list[str]:
        """Return the numbers of the pipelines, and of the stages."""
        return [ranks_text(self.numbers), ranks_text(self.positions)]

    def pipelines_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the numbers of the pipelines that have any of some devices."""
        wanted, each = {*ranks}, len(self.positions)
        starts = range(0, len(self.groups), each)
        owned = ({rank for group in self.groups[start : start + each] for rank in group} for start in starts)
        return [number for number, own in zip(self.numbers, owned, strict=True) if own & wanted]

    @property
    def stages(self) -> Iterator[tuple[int, tuple[float, float]]]:
        """Yield each device with its shares of the sequence and of what is split."""
        return ((rank, own) for group in self.groups for rank, own in zip(group, self.stage.shares, strict=True))


def alike(pipelines: Sequence[Pipeline]) -> list[Alike]:
    """Return the stages of pipelines, those together that are in one row."""
    return [found for numbers in _like_pipelines(pipelines) for found in _alike_in(numbers, pipelines)]


def _like_pipelines(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """Return the numbers of pipelines that differ in their devices alone."""
    found: dict[object, list[int]] = {}
    for number, pipeline in enumerate(pipelines):
        stages = tuple(map(_anywhere, pipeline.stages))
        found.setdefault((pipeline.share, pipeline.micro_batches, pipeline.max_length, stages), []).append(number)
    return list(found.values())


def _anywhere(stage: Stage) -> Stage:
    """Return the stage on the first devices that there are."""
    return replace(stage, devices=tuple(range(len(stage.devices))))


def _alike_in(numbers: Sequence[int], pipelines: Sequence[Pipeline]) -> Iterator[Alike]:
    like = [pipelines[number] for number in numbers]
    for positions in _runs(like[0].stages, is_short=have_few_devices(pipelines)):
        groups = tuple(pipeline.stages[position].devices for pipeline in like for position in positions)
        yield Alike(tuple(numbers), like[0], positions, groups)


def have_few_devices(pipelines: Sequence[Pipeline]) -> bool:
    """Tell whether pipelines have few devices, so that each is written out."""
    return len(_devices(pipelines)) <= FEW_DEVICES


def _devices(pipelines: Iterable[Pipeline]) -> tuple[int, ...]:
    return tuple(device for pipeline in pipelines for device in pipeline.devices)


def _runs(stages: Sequence[Stage], *, is_short: bool) -> Iterator[range]:
    """Yield the positions of like stages that follow each other; of a short plan each alone."""
    start = 0
    for _, run in groupby(range(len(stages)), lambda i: i if is_short else _anywhere(stages[i])):
        stop = start + len(list(run))
        yield range(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class LikeDeviceGroup:
    """Devices of stages that are alike, which do the same.

    Attributes:
        alike: the stages.
        ranks: the devices.
        rows: the share of the batch that its pipeline has.
        shard: the share of what its stage cuts that a device has.
        costs: of the devices, where they are predicted.
    """

    alike: Alike
    ranks: tuple[int, ...]
    rows: float
    shard: float
    costs: tuple[DeviceCost, ...]

    @property
    def place(self) -> list[str]:
        """Return the numbers of the pipelines that have the devices, and of the stages."""
        return [ranks_text(self.alike.pipelines_of(self.ranks)), ranks_text(self.alike.positions)]

    @property
    def most(self) -> DeviceCost:
        """Return what the device costs that needs most memory."""
        return max(self.costs, key=lambda cost: cost.total_bytes)


def device_groups(pipelines: Sequence[Pipeline], predicted: Prediction | None) -> Iterator[LikeDeviceGroup]:
    """Yield the devices of pipelines, those together that do the same; of a short plan, of which the same is shown."""
    costs = {} if predicted is None else {device.rank: device for device in predicted.devices}
    total = sum(pipeline.share for pipeline in pipelines)
    for found in alike(pipelines):
        for shard, ranks in _like_devices(found, costs, is_short=have_few_devices(pipelines)):
            own = tuple(costs[rank] for rank in ranks if rank in costs)
            yield LikeDeviceGroup(found, ranks, found.pipeline.share / total, shard, own)


def _like_devices(
    found: Alike, costs: Mapping[int, DeviceCost], *, is_short: bool
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield shards and the devices that have them, and as much memory; of a short plan also what is shown of them."""
    like: dict[tuple[object, ...], list[tuple[float, int]]] = {}
    for rank, (context, tensor) in found.stages:
        shown = _shown(costs[rank], is_short=is_short) if rank in costs else ()
        like.setdefault((share_text(context * tensor), *shown), []).append((context * tensor, rank))
    yield from ((pairs[0][0], tuple(rank for _, rank in pairs)) for pairs in like.values())


def _shown(cost: DeviceCost, *, is_short: bool) -> tuple[object, ...]:
    return (memory_text(cost), busy_text([cost])) if is_short else (cost.limit_bytes,)


def memory_text(cost: DeviceCost) -> str:
    """Return what a device needs of what it has: `2 of 8 MB (25 %)`."""
    if cost.limit_bytes is None:
        return bytes_text(cost.total_bytes)
    return (
        f"{format_used_bytes(cost.total_bytes, cost.limit_bytes)} ({share_text(cost.total_bytes / cost.limit_bytes)})"
    )


def idle_seconds(cost: DeviceCost) -> float:
    return dict(cost.seconds).get("idle", 0.0)


def busy_shares(costs: Iterable[DeviceCost]) -> list[float]:
    """Return the shares of the step in which devices do not wait for others."""
    return [1 - idle_seconds(cost) / cost.total_seconds for cost in costs if cost.total_seconds]


def busy_text(costs: Sequence[DeviceCost]) -> str:
    """Return the share in which devices do not wait: that of all, or the least and the most."""
    shares = busy_shares(costs)
    ends = list(dict.fromkeys(share_text(share) for share in (min(shares), max(shares)))) if shares else [""]
    return "-".join([*(end.removesuffix(" %") for end in ends[:-1]), ends[-1]])


PLAN_HEADER = ("pipeline", "rows", "micro-batches", "stage", "devices", "ratios", "blocks")
PROGRAM_HEADER = ("ops", "cut on", "ratios", "gradients")
HEADER = ("device", "pipeline", "stage", "rows", "shard", "memory", "busy")

_FEW_GROUPS = 2  # of like stages, whose devices are written out
_FEW_RANKS = 4  # of a group
_LONG = 12  # letters of ratios that are all alike


def plan_table(pipelines: Sequence[Pipeline]) -> str:
    """Return the table of pipelines and stages; what is a pipeline's stands with its first stage."""
    return table_text(PLAN_HEADER, [_plan_row(found) for found in alike(pipelines)])


def program_text(pipelines: Iterable[Pipeline]) -> Iterator[str]:
    """Yield the table of a program: ops of each region, what they are cut on, how gradients of weights are made."""
    for stage in (stage for pipeline in pipelines for stage in pipeline.stages):
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


def left_out_text(
    pipelines: Sequence[Pipeline], predicted: Prediction | None, devices: Iterable[int] = ()
) -> Iterator[str]:
    """Yield a line on the devices that pipelines do not use, of some and of those that were planned for, if any."""
    known, used = {*devices, *(() if predicted is None else predicted.left_out)}, {*_devices(pipelines)}
    idle = known - used
    if idle:
        yield f"left out: {len(idle)} of {len(known | used)} devices, {ranks_text(idle)}"
        yield from () if predicted is None else (f"- {why}" for why in predicted.left_out_why)


def sentence(pipelines: Sequence[Pipeline], predicted: Prediction | None, devices: Iterable[int] = ()) -> str:
    """Say in words who computes what: `2 of 4 devices compute each batch in 32.3 ms (predicted): 2 replicas`."""
    own = _devices(pipelines)
    known = {*devices, *own, *(() if predicted is None else predicted.left_out)}
    used, counts = len(own), [len(pipeline.stages) for pipeline in pipelines]
    who = f"device {own[0]}" if used == len(known) == 1 else f"{used} devices"
    who = who if used == len(known) else f"{used} of {len(known)} devices"
    step = "" if predicted is None else f" in {seconds_text(predicted.seconds)} (predicted)"
    most = max(len(stage.devices) for pipeline in pipelines for stage in pipeline.stages)
    told = [f"{len(counts)} replicas{_uneven([one.share for one in pipelines])}"] if len(counts) > 1 else []
    told += [f"{'' if len({*counts}) == 1 else 'up to '}{max(counts)} stages"] if max(counts) > 1 else []
    told += [f"up to {most} devices a stage"] if most > 1 else []
    return f"{who} compute{'s' if used == 1 else ''} each batch{step}{': ' if told else ''}{', '.join(told)}"


def _uneven(shares: Sequence[int]) -> str:
    """Return the shares of rows where they are not even: all of a few, of many the least and the most."""
    if len({*shares}) == 1:
        return ""
    if len(shares) <= _FEW_RANKS:
        return f" with rows {':'.join(map(str, shares))}"
    return f" with rows from {min(shares)} to {max(shares)} of {sum(shares)}"


def device_rows(pipelines: Sequence[Pipeline], predicted: Prediction | None) -> Iterator[list[str]]:
    """Yield what devices do, under `HEADER`, a row for those that do the same; none without a prediction.

    rows: its pipeline's share of the batch; shard: its share of what its stage cuts; memory: what it needs, of what
    it has, of several the most; busy: the share of the step in which it does not wait for others.
    """
    for group in device_groups(pipelines, predicted):
        if group.costs:
            cells = [share_text(group.rows), share_text(group.shard), memory_text(group.most), busy_text(group.costs)]
            yield [ranks_text(group.ranks), *group.place, *cells]


def busiest(pipelines: Sequence[Pipeline], predicted: Prediction | None) -> list[int]:
    """Return of each row of many devices the one that waits least; none for a few."""
    if predicted is None or have_few_devices(pipelines):
        return []
    told = (group.costs for group in device_groups(pipelines, predicted) if group.costs)
    return [min(costs, key=lambda cost: (idle_seconds(cost), cost.rank)).rank for costs in told]


def rows_text(pipeline: Pipeline) -> str:
    """Return a pipeline's share and parts: `3 rows in 2`."""
    noun = "row" if pipeline.share == 1 else "rows"
    parts = f" in {pipeline.micro_batches}" if pipeline.micro_batches > 1 else ""
    return f"{pipeline.share} {noun}{parts}{limit_text(pipeline)}"


def pipelines_text(pipelines: Iterable[Pipeline]) -> str:
    """Return pipelines on one line: `3 rows in 2: [0,1 2:1]x3 > [2]x1 | 1 row: [3]x4`."""
    return " | ".join(f"{rows_text(pipeline)}: {pipeline}" for pipeline in pipelines)


def short_text(pipelines: Sequence[Pipeline]) -> str:
    """Return pipelines on a line: their summary, or of many devices what pipelines and stages are alike in.

    `2 x 1 row in 32: 3 x [2 devices]x1 > [2 devices]x4` are two pipelines of four stages each.
    """
    if have_few_devices(pipelines):
        return pipelines_text(pipelines)
    by_pipeline = groupby(alike(pipelines), lambda found: found.numbers)
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
