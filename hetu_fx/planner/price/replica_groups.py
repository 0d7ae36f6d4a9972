"""Which devices of a plan hold the same parameters, and so meet in gradient syncs: one of every pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hetu_fx.planner.price.placement import stops_of
from hetu_fx.plans.plan import Plan


class Columns:
    """Groups that hold a block, and their devices that stand at the same height of them.

    Devices of a column share one tuple, so that what depends on the column alone can be worked out once for all.
    """

    def __init__(self, plan: Plan, num_blocks: int) -> None:
        """Raises `PlanError` where the plan does not fit so many blocks."""
        self._plan, self._num_blocks = plan, num_blocks
        known = {pipeline.blocks(num_blocks): pipeline for pipeline in plan.pipelines}
        stops = {blocks: stops_of(pipeline, num_blocks) for blocks, pipeline in known.items()}
        self._stops = [stops[pipeline.blocks(num_blocks)] for pipeline in plan.pipelines]
        self._groups: dict[int, list[tuple[int, ...]]] = {}
        self._known: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def stops(self, pipeline: int) -> tuple[int, ...]:
        """Return where the blocks of each stage of a pipeline begin, and where the last one's end."""
        return self._stops[pipeline]

    def of(self, pipeline: int, stage: int, position: int) -> tuple[int, ...]:
        """Return the ranks that hold the first block of a stage, in the order of pipelines, with the device asked for.

        Where groups differ in size, a device meets those that stand at the same height of theirs.
        """
        devices = self._plan.pipelines[pipeline].stages[stage].devices
        found = self._column(self._stops[pipeline][stage], position, len(devices))
        return found if found[pipeline] == devices[position] else _with(found, pipeline, devices[position])

    def _column(self, block: int, position: int, size: int) -> tuple[int, ...]:
        key = block, position, size
        if key not in self._known:
            groups = self._holders(block)
            self._known[key] = tuple([devices[position * len(devices) // size] for devices in groups])
        return self._known[key]

    def _holders(self, block: int) -> list[tuple[int, ...]]:
        """Return the group of each pipeline that holds a block; the last one for what stands after all."""
        if block not in self._groups:
            pairs = zip(self._plan.pipelines, self._stops, strict=True)
            found = [p.stages[min(bisect_right(own, block), len(p.stages)) - 1].devices for p, own in pairs]
            self._groups[block] = found
        return self._groups[block]


def _with(column: Sequence[int], pipeline: int, rank: int) -> tuple[int, ...]:
    """Return the column of a stage without blocks: with its own device instead of that which has the next block."""
    return (*column[:pipeline], rank, *column[pipeline + 1 :])
