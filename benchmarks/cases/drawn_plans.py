"""Plans drawn at random, of all kinds that a program allows: rows to replicas, groups, stages, and mixtures of these.

Work goes to devices evenly, or by their speed: without that no drawn plan would be near the best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.device_orders import Space, compositions
from hetu_fx.plans.plan import Pipeline, Plan, Stage

KINDS = ("one device", "replicas", "group", "stages", "mixture")
BY_SPEED = 0.7  # how often work goes by speed
MOST_DRAWS = 600
MICRO_BATCHES = (1, 2, 4, 8)

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Draw:
    """Draws plans for a program.

    Attributes:
        speeds: of the devices, by rank.
        space: what the program's units and blocks allow.
        units, num_blocks, rows: what is shared out in a group, over stages, and over pipelines.
        rng: seeded.
    """

    speeds: Sequence[float]
    space: Space
    units: int
    num_blocks: int
    rows: int
    rng: random.Random

    def plans(self, count: int) -> list[Plan]:
        """Return so many different plans, as many of each kind as can be."""
        drawn = dict.fromkeys(self.plan() for _ in range(MOST_DRAWS))
        of_kinds = [[plan for plan in drawn if kind_of(plan) == kind] for kind in KINDS]
        return list(_in_turn(of_kinds, count))

    def plan(self) -> Plan:
        """Return a plan over some of the devices."""
        ranks = list(range(len(self.speeds)))
        self.rng.shuffle(ranks)
        used = ranks[: self.rng.randint(1, len(ranks))]
        sizes = self.rng.choice(compositions(len(used), len(used), len(used)))
        replicas = [self._groups(part) for part in _parts(used, sizes)]
        rows = self._shares(self.rows, [[rank for group in groups for rank in group] for groups in replicas])
        depth = max(map(len, replicas))
        micro_batches = self.rng.choice(MICRO_BATCHES) if depth > 1 else 1
        pipelines = (self._pipeline(g, share, micro_batches) for g, share in zip(replicas, rows, strict=True))
        schedule = self.rng.choice(("1f1b", "gpipe")) if depth > 1 else "1f1b"
        return Plan(tuple(pipelines), schedule=schedule, zero=self.rng.choice((0, 1)) if len(replicas) > 1 else 1)

    def _groups(self, devices: Sequence[int]) -> Groups:
        sizes = compositions(len(devices), self.space.largest_group, self.space.most_stages)
        return list(_parts(devices, self.rng.choice(sizes))) if sizes else [devices[:1]]

    def _pipeline(self, groups: Groups, rows: int, micro_batches: int) -> Pipeline:
        blocks = self._shares(self.num_blocks, groups) if len(groups) > 1 else (None,)
        stages = (self._stage(group, count) for group, count in zip(groups, blocks, strict=True))
        return Pipeline(tuple(stages), share=rows, micro_batches=micro_batches)

    def _stage(self, group: Sequence[int], blocks: int | None) -> Stage:
        ratios = self._shares(self.units, [[rank] for rank in group]) if len(group) > 1 else (1,)
        return Stage(tuple(group), ratios, blocks)

    def _shares(self, total: int, groups: Groups) -> tuple[int, ...]:
        by_speed = self.rng.random() < BY_SPEED
        speeds = [sum(self.speeds[rank] for rank in group) if by_speed else 1.0 for group in groups]
        seconds: list[Callable[[int], float]] = [partial(_seconds, speed) for speed in speeds]
        shares = spread(total, seconds, low=(1,) * len(groups))
        assert shares is not None, "the space allows no more receivers than there are parts"
        return shares


def kind_of(plan: Plan) -> str:
    """Return which of KINDS a plan is."""
    groups = any(len(stage.devices) > 1 for *_, stage in plan.stages)
    stages = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    replicas = len(plan.pipelines) > 1
    if groups + stages + replicas > 1:
        return "mixture"
    return "replicas" if replicas else "stages" if stages else "group" if groups else "one device"


def _seconds(speed: float, count: int) -> float:
    return count / speed


def _parts(items: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    stop = 0
    for size in sizes:
        stop += size
        yield items[stop - size : stop]


def _in_turn(kinds: Sequence[list[Plan]], count: int) -> Iterator[Plan]:
    """Yield plans of each kind in turn, as long as there are some."""
    longest = max(map(len, kinds))
    ordered = [plans[i] for i in range(longest) for plans in kinds if i < len(plans)]
    yield from ordered[:count]
