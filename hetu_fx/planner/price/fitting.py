"""The recompute with which a plan fits memory in least time.

A plan that does not fit memory recomputes. A block that is recomputed keeps what enters it, and takes its forward once
more (Chen et al., Training Deep Nets with Sublinear Memory Cost, section 4). The more blocks a stage recomputes the
less it holds, so that the fewest that fit are found by bisection: for all ops of a block, and for only some of them
(`plans.recomputed`), which keeps more and takes less. Each stage has the ops with which it takes least time. Of a stage
in chunks the first blocks of the first chunk recompute first, and what its devices hold counts in all chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.placement import (
    PlacedDevice,
    alike_key,
    by_rank,
    homes_by_memory,
    peak_terms,
    placed_devices,
)
from hetu_fx.planner.price.stage_seconds import device_lines, forward_lines
from hetu_fx.planner.price.step import PricedStep
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Schedule, Stage
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.plans.stage import chunk_sizes

Place = tuple[int, int]
"""A stage, by the numbers of its pipeline and its own."""

_STEP = 2  # blocks more than what is known of others may have to be recomputed


def least_blocks(count: int, fits: Callable[[int], bool], known: int = 0) -> int | None:
    """Return the least number, `known` to `count`, of blocks recomputed that fits; None if not even all of them do.

    That fewer than `known` do not fit is taken as known.
    """
    if fits(known):
        return known
    near = known + _STEP
    if known and near < count and fits(near):
        return bisect_left(range(known + 1, near), True, key=fits) + known + 1
    if known >= count or not fits(count):
        return None
    return bisect_left(range(known + 1, count), True, key=fits) + known + 1


def fit_recompute(plan: Plan, costs: ProgramCosts, cluster: Cluster, options: PlanOptions) -> PricedStep | None:
    """Return a plan with the recompute that fits memory in least time, priced; None where nothing fits.

    Homes are shared out by memory where that fits with less of it, or at all. Without `options.recompute` the plan is
    returned as it is, if it fits. Its blocks must be written out.
    """
    fraction = options.memory_fraction
    bare = PricedStep(_recomputing(plan, {}) if options.recompute else plan, costs, cluster)
    if bare.fits(fraction):
        return bare
    known = [bare, *_homed(bare.plan, costs, cluster, fraction)]
    fitting = next((one for one in known[1:] if one.fits(fraction)), None)
    if fitting is not None or not options.recompute:
        return fitting
    most = _recomputing(bare.plan, {(i, j): stage.recomputing(stage.blocks or 0) for i, j, stage in plan.stages})
    known += _homed(bare.plan, costs, cluster, fraction, most)
    for one in known:
        stages = _least_recompute(one, costs, cluster, fraction)
        if stages is not None:
            return PricedStep(_recomputing(one.plan, stages), costs, cluster)
    return None


def _homed(
    plan: Plan, costs: ProgramCosts, cluster: Cluster, fraction: float, most: Plan | None = None
) -> list[PricedStep]:
    """Return a plan with homes by memory, by what devices hold under `most`; none where that is settled."""
    if plan.homes or not plan.zero or len(plan.devices) == 1:
        return []
    limits = {rank: cluster.device(rank).usable_bytes(fraction) for rank in plan.devices}
    homes = homes_by_memory(most or plan, costs, limits).homes
    return [PricedStep(replace(plan, homes=homes), costs, cluster)] if homes else []


def _least_recompute(
    bare: PricedStep, costs: ProgramCosts, cluster: Cluster, fraction: float
) -> dict[Place, Stage] | None:
    """Return each stage with what it has to recompute; None where a device does not fit with all."""
    plan, asked, least = bare.plan, costs.under(bare.plan), dict[Place, _Least]()
    speeds, seen = {device.rank: device.speed for device in cluster.devices}, set[Hashable]()
    for rank, places in by_rank(placed_devices(plan, costs, speeds, bare.unlike)).items():
        key, limit = (places[0].pipeline, places[0].stage), cluster.device(rank).usable_bytes(fraction)
        if (held := (key, alike_key(places), limit)) in seen:
            continue
        seen.add(held)
        known = least.get(key) or _Least.nothing(places, plan, asked)
        least[key] = known.fitting(places, limit)
        if not least[key].counts:
            return None
    found = {key: one.fastest(asked, cluster) for key, one in least.items()}
    return {(i, j): replace(found[bare.like[i], j], devices=stage.devices) for i, j, stage in plan.stages}


@dataclass(frozen=True, slots=True)
class _Least:
    """The least blocks of a stage to recompute for each kind of ops of them with which its devices fit.

    `starts` are the first blocks of its parts, `rows` those of a micro-batch.
    """

    stage: Stage
    starts: tuple[int, ...]
    rows: int
    schedule: Schedule
    counts: Mapping[RecomputedOps, int]

    @classmethod
    def nothing(cls, places: Sequence[PlacedDevice], plan: Plan, costs: ProgramCosts) -> _Least:
        """Return what a stage needs before its devices are asked."""
        first = places[0]
        stage = plan.pipelines[first.pipeline].stages[first.stage]
        starts = tuple(place.piece.start for place in places)
        return cls(stage, starts, first.rows, plan.schedule, dict.fromkeys(costs.recompute_choices, 0))

    def fitting(self, places: Sequence[PlacedDevice], limit: int) -> _Least:
        """Return what the stage needs for one more device to fit its memory."""
        pairs = [(ops, self._least(places, ops, limit)) for ops in self.counts]
        return replace(self, counts={ops: max(self.counts[ops], n) for ops, n in pairs if n is not None})

    def fastest(self, costs: ProgramCosts, cluster: Cluster) -> Stage:
        """Return the stage with the recompute that takes least time; of equal ones that of fewest ops."""
        stages = [self.stage.recomputing(count, ops) for ops, count in self.counts.items()]
        return min(stages, key=lambda stage: self._seconds(stage, costs, cluster))

    def _seconds(self, stage: Stage, costs: ProgramCosts, cluster: Cluster) -> float:
        seconds = 0.0
        for part, start in zip(stage.chunks(len(self.starts), self._blocks), self.starts, strict=True):
            repeated = [costs.again(part, start, i) for i in range(len(part.devices))]
            seconds += max(line(self.rows) for line in forward_lines(device_lines(part, repeated, cluster)))
        return seconds

    def _least(self, places: Sequence[PlacedDevice], ops: RecomputedOps, limit: int) -> int | None:
        def fits(blocks: int) -> bool:
            pairs = zip(places, chunk_sizes(len(places), self._blocks, blocks), strict=True)
            held = [replace(place, piece=place.piece.recomputing(again, ops)) for place, (_, again) in pairs]
            return sum(count for _, count in peak_terms(held, self.schedule)) <= limit

        return least_blocks(self._blocks, fits)

    @property
    def _blocks(self) -> int:
        return self.stage.blocks or 0


def _recomputing(plan: Plan, stages: Mapping[Place, Stage]) -> Plan:
    """Return the plan with these stages, and others that recompute nothing."""
    if not stages and not plan.recomputes:
        return plan
    pipelines = []
    for i, pipeline in enumerate(plan.pipelines):
        own = [stages.get((i, j), stage.recomputing(0)) for j, stage in enumerate(pipeline.stages)]
        pipelines.append(replace(pipeline, stages=tuple(own)))
    return replace(plan, pipelines=tuple(pipelines))
