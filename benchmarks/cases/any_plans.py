"""Questions drawn at random: a cluster of 1 to 64 devices on 1 to 8 nodes, a program, and a plan of any shape for them.

Groups, contexts, stages and pipelines of unlike sizes, in any mixture; most plans have equal pipelines, as people write
them. The same seed draws the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases.planning import llama
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage

SPEEDS = (60e12, 125e12, 312e12, 400e12)
GBITS = (10, 100, 400)
HOST_SECONDS = (0.0, 0.01, 0.05)
UNITS = 8
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")


@dataclass(frozen=True)
class Drawn:
    """A plan with all that it is simulated by."""

    plan: Plan
    costs: ProgramCosts
    cluster: Cluster


def drawn(count: int, seed: int = 0) -> Iterator[Drawn]:
    """Draw so many."""
    rng = random.Random(seed)
    programs = [_program(rng) for _ in range(12)]
    for _ in range(count):
        costs, cluster = rng.choice(programs), _cluster(rng)
        yield Drawn(draw_plan(cluster, costs, rng), costs, cluster)


def _program(rng: random.Random) -> ProgramCosts:
    hidden = rng.choice((1024, 2048, 4096))
    profile = llama(rng.choice((8, 16, 24)), hidden, int(2.7 * hidden), rng.choice((32, 64)), UNITS, 2048)
    costs = profile.costs
    sent = dict(gathered_bytes=costs.blocks[0].reduced_bytes / 2, num_gathers=2)
    blocks = tuple(PartCosts(**{**_values(block), **sent}) for block in costs.blocks)
    return ProgramCosts(costs.rows, costs.before, blocks, costs.after, costs.boundary_bytes, costs.units)


def _values(part: PartCosts) -> dict[str, float]:
    return {name: getattr(part, name) for name in PartCosts.__dataclass_fields__}


def _cluster(rng: random.Random) -> Cluster:
    """Draw devices of one kind or two, each node of one kind."""
    nodes = rng.randint(1, 8)
    per_node = rng.choice([size for size in (1, 2, 4, 8) if size * nodes <= 64])
    kinds = rng.sample(range(len(SPEEDS)), rng.choice((1, 1, 2)))
    of_node = [rng.choice(kinds) for _ in range(nodes)]
    places = [node for node in range(nodes) for _ in range(per_node)]
    made = Cluster.on_paper(
        [SPEEDS[of_node[node]] for node in places],
        nodes=[str(node) for node in places],
        kinds=[f"kind {of_node[node]}" for node in places],
        intra=Link(2e11, 5e-6),
        inter=Link(rng.choice(GBITS) * 1.25e8, 1e-5),
    )
    hosts = [rng.choice(HOST_SECONDS) for _ in range(nodes)]
    devices = (replace(d, step_seconds=hosts[node]) for d, node in zip(made.devices, places, strict=True))
    return replace(made, devices=tuple(devices))


def draw_plan(cluster: Cluster, costs: ProgramCosts, rng: random.Random) -> Plan:
    """Draw a plan over some of the devices, or all."""
    ranks = list(cluster.ranks)
    if rng.random() < 0.2:
        rng.shuffle(ranks)
    count = rng.choice((len(ranks), len(ranks), rng.randint(1, len(ranks))))
    replicas = list(_equal(ranks[:count], costs, rng) if rng.random() < 0.7 else _unequal(ranks[:count], costs, rng))
    micro_batches = rng.choice((1, 2, 4, 8))
    pipelines = [_pipeline(groups, cluster, costs, micro_batches, rng) for groups in replicas]
    least = min(stage.blocks or 0 for pipeline in pipelines for stage in pipeline.stages)
    schedules = [schedule for schedule in SCHEDULES if schedule != "interleaved" or least > 1]
    return Plan(tuple(pipelines), schedule=rng.choice(schedules), zero=rng.choice((0, 1)))


Groups = Sequence[Sequence[int]]


def _equal(ranks: Sequence[int], costs: ProgramCosts, rng: random.Random) -> Iterator[Groups]:
    """Yield as many pipelines of equal groups as there is room for."""
    group = rng.choice([size for size in (1, 2, 4, 8) if size <= len(ranks)])
    stages = rng.choice([size for size in (1, 2, 4, 8) if size * group <= len(ranks) and size <= costs.num_blocks])
    whole = stages * group
    for start in range(0, min(len(ranks) // whole, costs.rows) * whole, whole):
        yield [ranks[first : first + group] for first in range(start, start + whole, group)]


def _unequal(ranks: Sequence[int], costs: ProgramCosts, rng: random.Random) -> Iterator[Groups]:
    """Yield pipelines of groups of any sizes."""
    left = list(ranks)
    made = 0
    while left and made < costs.rows:
        groups = []
        for _ in range(rng.randint(1, min(6, costs.num_blocks))):
            if left:
                size = rng.choice([size for size in (1, 1, 2, 3, 4, 8) if size <= len(left)])
                groups.append(left[:size])
                del left[:size]
        yield groups
        made += 1


def _pipeline(
    groups: Groups, cluster: Cluster, costs: ProgramCosts, micro_batches: int, rng: random.Random
) -> Pipeline:
    """Return a pipeline whose blocks and rows go by speed."""
    speeds = [sum(cluster.device(rank).speed for rank in group) for group in groups]
    blocks = _shares(costs.num_blocks, speeds)
    stages = (_stage(group, count, rng) for group, count in zip(groups, blocks, strict=True))
    return Pipeline(tuple(stages), share=max(1, round(sum(speeds) / 1e12)), micro_batches=micro_batches)


def _stage(group: Sequence[int], blocks: int, rng: random.Random) -> Stage:
    context = rng.choice([ways for ways in (1, 1, 1, 2, len(group)) if len(group) % ways == 0])
    recompute = rng.choice((0, 0, 0, blocks))
    return Stage(tuple(group), blocks=blocks, context=context, recompute=recompute)


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Cut a number in whole parts of at least 1, in proportion."""
    bounds = [round((total - len(weights)) * sum(weights[:i]) / sum(weights)) for i in range(len(weights) + 1)]
    return [1 + stop - start for start, stop in itertools.pairwise(bounds)]
