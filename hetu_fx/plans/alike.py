"""What of a plan is alike: stages that differ in their devices alone, and devices that do the same.

So that a plan of thousands of devices is told in a few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from hetu_fx.base.words import bytes_of, bytes_text, ranks_text, share_text
from hetu_fx.plans.prediction import DeviceCost
from hetu_fx.plans.stage import Pipeline, Stage

if TYPE_CHECKING:
    from hetu_fx.plans.plan import Plan

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


def alike(plan: Plan) -> list[Alike]:
    """Return the stages of a plan, those together that stand in one row."""
    return [found for numbers in _like_pipelines(plan) for found in _alike_in(numbers, plan)]


def _like_pipelines(plan: Plan) -> list[list[int]]:
    """Return the numbers of pipelines that differ in their devices alone."""
    found: dict[object, list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        stages = tuple(map(_anywhere, pipeline.stages))
        found.setdefault((pipeline.share, pipeline.micro_batches, pipeline.max_length, stages), []).append(number)
    return list(found.values())


def _anywhere(stage: Stage) -> Stage:
    """Return the stage on the first devices that there are."""
    return replace(stage, devices=tuple(range(len(stage.devices))))


def _alike_in(numbers: Sequence[int], plan: Plan) -> Iterator[Alike]:
    pipelines = [plan.pipelines[number] for number in numbers]
    for positions in _runs(pipelines[0].stages, is_short=len(plan.devices) <= FEW_DEVICES):
        groups = tuple(pipeline.stages[position].devices for pipeline in pipelines for position in positions)
        yield Alike(tuple(numbers), pipelines[0], positions, groups)


def _runs(stages: Sequence[Stage], *, is_short: bool) -> Iterator[range]:
    """Yield the positions of like stages that follow each other; of a short plan each alone."""
    start = 0
    for _, run in groupby(range(len(stages)), lambda i: i if is_short else _anywhere(stages[i])):
        stop = start + len(list(run))
        yield range(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class Group:
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


def groups_of(plan: Plan) -> Iterator[Group]:
    """Yield the devices of a plan, those together that do the same; of a short plan, of which the same is shown."""
    costs = _costs_of(plan)
    total = sum(pipeline.share for pipeline in plan.pipelines)
    for found in alike(plan):
        for shard, ranks in _like_devices(found, costs, is_short=len(plan.devices) <= FEW_DEVICES):
            own = tuple(costs[rank] for rank in ranks if rank in costs)
            yield Group(found, ranks, found.pipeline.share / total, shard, own)


def _costs_of(plan: Plan) -> Mapping[int, DeviceCost]:
    return {} if plan.predicted is None else {device.rank: device for device in plan.predicted.devices}


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
    return f"{bytes_of(cost.total_bytes, cost.limit_bytes)} ({share_text(cost.total_bytes / cost.limit_bytes)})"


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
