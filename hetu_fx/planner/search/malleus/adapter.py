"""The Malleus search, as the table of searches knows it: its situations, from profile and cluster, and mended plans.

Malleus plans for a given number of pipelines, largest group and micro-batches; here several of each are tried, and
the cost model that all searches share says which plan is best. Seconds of a layer on a group come from measured
times, from alpha, or else from the cost model, in this order.

Besides, plans without stragglers are mended for them (`search.mending`). Malleus itself deals all groups anew and
minimises the seconds of a steady pipeline; what fills and empties it, and what follows it, is counted there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

from hetu_fx.cluster.cluster import Device
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.alike import alike
from hetu_fx.planner.price.stage_seconds import compute_lines, pipeline_seconds, stage_costs, tensor_parallel_lines
from hetu_fx.planner.search.allocate import spread
from hetu_fx.planner.search.contiguous import replica_counts
from hetu_fx.planner.search.device_orders import EXHAUSTIVE_DEVICES
from hetu_fx.planner.search.homogeneous import TimedArrangement, candidates
from hetu_fx.planner.search.malleus.search import search
from hetu_fx.planner.search.malleus.situation import LayerMemory, MalleusSituation
from hetu_fx.planner.search.mending import mend_best_plans
from hetu_fx.planner.search.problem import WORTH, Candidates, Problem, Search
from hetu_fx.planner.values.device_memory import fixed_bytes
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class Shape:
    """What Malleus keeps fixed: pipelines side by side, devices of the largest group, micro-batches of a step."""

    pipelines: int
    largest_group: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.pipelines} pipelines, groups up to {self.largest_group}, {self.micro_batches} micro-batches"


def shapes(problem: Problem, healthy: Sequence[TimedArrangement]) -> Iterator[Shape]:
    """Yield the shapes to try: those of the best plans without stragglers, which are given and which Malleus keeps.

    And the best of these with a pipeline less and more: where as much as a pipeline is slow, fewer are faster. In
    clusters up to `EXHAUSTIVE_DEVICES` devices all shapes are tried.
    """
    count, known = len(problem.cluster.devices), set(degrees(problem))
    if count <= EXHAUSTIVE_DEVICES:
        yield from _all_shapes(problem)
        return
    found = (Shape(c.degrees.pipelines, c.degrees.group, c.degrees.pipelines * c.micro_batches) for c in healthy)
    in_node = (shape for shape in found if shape.largest_group in known)
    within = (replace(shape, micro_batches=min(shape.micro_batches, problem.costs.rows)) for shape in in_node)
    few = tuple(itertools.islice(dict.fromkeys(within), max(1, 128 // count)))
    yield from dict.fromkeys((*few, *(other for shape in few[:1] for other in _beside(shape))))


def _beside(shape: Shape) -> Iterator[Shape]:
    """Yield the shape with a pipeline less and more."""
    for pipelines in (shape.pipelines - 1, shape.pipelines + 1):
        if 1 <= pipelines <= shape.micro_batches:
            yield replace(shape, pipelines=pipelines)


def _all_shapes(problem: Problem) -> Iterator[Shape]:
    count, rows = len(problem.cluster.devices), problem.costs.rows
    for degree in degrees(problem):
        for pipelines in replica_counts(min(count, rows)):
            for micro_batches in sorted(
                {min(rows, pipelines * m) for m in problem.options.micro_batches}, reverse=True
            ):
                yield Shape(pipelines, degree, micro_batches)


def degrees(problem: Problem) -> tuple[int, ...]:
    """Return the powers of two that divide what can be cut, up to the largest node."""
    nodes = [device.node for device in problem.cluster.devices]
    most = max(map(nodes.count, nodes)) if problem.options.tensor_parallel else 1
    units = problem.costs.units
    return tuple(size for size in (1 << i for i in range(most.bit_length())) if size <= most and units % size == 0)


def situation(problem: Problem, shape: Shape, *, recompute: bool = False) -> MalleusSituation:
    """Return what Malleus plans for, all blocks recomputed or none; raises `PlanError` for a shape that cannot be."""
    rows, fraction = math.ceil(problem.costs.rows / shape.micro_batches), problem.options.memory_fraction
    devices = [replace(d, memory_bytes=d.usable_bytes(fraction)) for d in problem.cluster.devices]
    seconds = {size: layer_seconds(problem, size, rows) for size in degrees(problem) if size <= shape.largest_group}
    return MalleusSituation(
        cluster=replace(problem.cluster, devices=tuple(devices)),
        num_layers=problem.costs.num_blocks,
        num_micro_batches=shape.micro_batches,
        num_pipelines=shape.pipelines,
        layer_seconds=_worthwhile(seconds),
        memory=_layer_memory(problem, shape, rows, recompute=recompute),
    )


def layer_seconds(problem: Problem, size: int, rows: int) -> float:
    """Return the seconds of a block and a micro-batch of `rows` rows on a healthy group of the fastest devices."""
    return layer_line(problem, size)(rows)


def layer_line(problem: Problem, size: int) -> Line:
    """Return the seconds of a block on a healthy group of the fastest devices, by the rows of a micro-batch.

    Infinite for a size that nothing is known of where others are known: what is measured, told and counted never mixes.
    """
    fastest = _fastest(problem)
    times, alpha = problem.profile.block_times(fastest.kind), problem.profile.slowdown(fastest.kind)
    length = problem.profile.tokens_per_row
    if length and times:
        known = times.get(size)
        return Line(math.inf) if known is None else Line(known.c, known.seconds(length) - known.c)
    if alpha:
        return Line(alpha.get(size, math.inf))  # only their ratios matter
    alike = tuple(replace(fastest, rank=rank, node="0", rate=1.0) for rank in range(size))
    healthy, stage = replace(problem.cluster, devices=alike), Stage(tuple(range(size)))
    blocks = reduce(add, problem.costs.blocks)
    sums, returns = tensor_parallel_lines(stage, blocks, healthy)
    whole, count = compute_lines(stage, blocks, healthy)[0] + sums + returns, problem.costs.num_blocks
    return Line(whole.fixed / count, whole.slope / count)


def _fastest(problem: Problem) -> Device:
    return max(problem.cluster.devices, key=lambda device: (device.flops_per_second, -device.rank))


def _worthwhile(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the group sizes that are faster than all smaller ones."""
    result: dict[int, float] = {}
    for size in sorted(seconds):
        if seconds[size] < min(result.values(), default=math.inf):
            result[size] = seconds[size]
    return result


def _layer_memory(problem: Problem, shape: Shape, rows: int, *, recompute: bool = False) -> LayerMemory | None:
    """Return the bytes of a block on a group, cut as thin as the largest group cuts it; None if it holds nothing.

    A block that is recomputed keeps what enters it and what its group has sent.
    """
    size, costs = shape.largest_group, problem.costs
    entered = max(costs.boundary_bytes, default=0.0)

    def bytes_of(part: PartCosts) -> tuple[float, float]:
        parameters, zero = part.parameter_bytes_at(1 / size), problem.options.zero
        held = fixed_bytes(parameters, zero=zero, num_replicas=shape.pipelines, state=costs.state)
        return size * sum(count for _, count in held), size * rows * part.activation_bytes_at(1 / size)

    def lighter(block: PartCosts) -> tuple[float, float]:
        state, kept = bytes_of(block)
        return state, min(kept, size * rows * (entered + block.reduced_bytes * (size > 1)))

    state, kept = max((lighter(block) if recompute else bytes_of(block) for block in costs.blocks), key=sum)
    edge = max(sum(bytes_of(part)) for part in (costs.before, costs.after))
    return LayerMemory.linear(state, kept, edge_bytes=edge) if state + kept else None


def _find(problem: Problem) -> Candidates:
    found: dict[Plan, float] = {}
    all_healthy = problem.cluster.with_rates(dict.fromkeys(problem.cluster.ranks, 1.0))
    healthy = replace(problem, cluster=all_healthy)
    even = sorted(candidates(healthy), key=lambda candidate: candidate.seconds)
    tried = tuple(shapes(problem, even))
    for number, shape in enumerate(tried):
        if problem.time_limit.ends(found):
            return found
        problem.tell(f"malleus: {shape}", number, len(tried))
        plan = _plan(problem, shape, _below(problem, shape, min(found.values(), default=math.inf)))
        priced = None if plan is None else problem.fit_memory(plan)
        if priced is not None:
            shared = problem.fit_memory(_with_rows_shared(priced[0], problem))
            found |= dict(pair for pair in (priced, shared) if pair is not None)
    return found | ({} if healthy.cluster == problem.cluster else mend_best_plans(problem, healthy, even))


def _below(problem: Problem, shape: Shape, best: float) -> float:
    """Return the seconds, by Malleus' own prices of a shape's micro-batches, above which no plan is the best."""
    rows = math.ceil(problem.costs.rows / shape.micro_batches) * shape.micro_batches
    fastest = _fastest(problem)
    has_ratios_only = problem.profile.slowdown(fastest.kind) and not problem.profile.block_times(fastest.kind)
    return math.inf if has_ratios_only else WORTH * best * rows / problem.costs.rows


def _plan(problem: Problem, shape: Shape, below: float) -> Plan | None:
    """Return Malleus' plan of one shape, with recomputed blocks where it needs them; None where there is none."""
    ways = sorted({False, problem.options.recompute})
    made = next(filter(None, (_found(problem, shape, again, below) for again in ways)), None)
    if made is None:
        return None  # another shape may fit
    if not problem.options.pipelines and any(len(pipeline.stages) > 1 for pipeline in made.pipelines):
        return None
    return problem.plan(made.pipelines)


def _found(problem: Problem, shape: Shape, recompute: bool, below: float) -> Plan | None:
    try:
        return search(situation(problem, shape, recompute=recompute), problem.before, below).to_plan()
    except PlanError:
        return None


def _with_rows_shared(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with rows shared so that its pipelines end together: Malleus' micro-batches have one size."""
    like, parts = alike(plan, problem.costs.rows, problem.cluster), plan.parts(problem.costs.num_blocks)
    runs = {}
    for first in dict.fromkeys(like):
        priced = stage_costs(parts[first], problem.costs, problem.cluster)
        runs[first] = tuple([part.seconds for part in priced]), parts[first].micro_batches
    of_alike = {(lines, n): partial(pipeline_seconds, lines, micro_batches=n) for lines, n in runs.values()}
    costs = [of_alike[runs[first]] for first in like]
    rows = spread(problem.costs.rows, costs, low=(1,) * len(costs))
    assert rows is not None, "there are no more pipelines than rows"
    pairs = zip(plan.pipelines, rows, strict=True)
    shared = tuple(replace(p, share=count, micro_batches=min(p.micro_batches, count)) for p, count in pairs)
    return replace(plan, pipelines=shared)


def _lacks(problem: Problem) -> str:
    if problem.costs.num_blocks:
        return ""
    return "it places repeated blocks, but the program has none"


MALLEUS = Search(
    name="malleus",
    applies="devices of one kind, some of them stragglers: groups are split, layers and micro-batches moved, or "
    "devices left out",
    lacks=_lacks,
    find=_find,
)
