"""The HeteroAuto search, as the table of searches knows it: its problems, from a profile and a cluster.

HeteroAuto plans for micro-batches of one size; here several numbers of replicas and micro-batches are tried, and the
cost model that all searches share says which plan is best. Seconds of a layer come from measured times if there are
some of every kind, else from the cost model, so that kinds are compared by figures of one source. HeteroAuto recomputes
all layers of a stage or none; what is planned is the least of them that fits memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster, Device, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.stage import FORWARD_AND_BACKWARD
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.device_classes import Alike, alike_in
from hetu_fx.planner.search.device_orders import EXHAUSTIVE_DEVICES, replica_counts
from hetu_fx.planner.search.heteroauto.cost import HeteroStage
from hetu_fx.planner.search.heteroauto.problem import ChipKind, EndCosts, Freedom, HeteroProblem, Layer
from hetu_fx.planner.search.heteroauto.result import HeteroResult
from hetu_fx.planner.search.heteroauto.search import search_below
from hetu_fx.planner.search.homogeneous import candidates
from hetu_fx.planner.search.malleus.adapter import degrees, layer_seconds
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.search.regions import MOST_CLASSES
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage

MARGINS = (1.0, 0.85, 0.7)
"""Parts of the memory to plan for, one after the other until a plan fits: passing buffers are not in HeteroAuto's."""

MANY_DEVICES = 64
"""In larger clusters, a shape takes seconds to search: `MOST_WORK` is the shapes times the devices that are."""

MOST_WORK = 1024

_WORTH = 1.25  # what HeteroAuto's own prices say is slower than the best so far by this factor is not tried


def hetero_problem(problem: Problem, replicas: int, micro_batches: int, margin: float = 1.0) -> HeteroProblem:
    """Return what HeteroAuto plans for, each replica having so many micro-batches, within a part of the memory."""
    costs, rows = problem.costs, math.ceil(problem.costs.rows / (replicas * micro_batches))
    block = _largest_block(problem)
    known = _of_one_source(problem)
    return HeteroProblem(
        kinds=tuple(_kind(known, alike, rows, margin) for alike in alike_in(problem.cluster)),
        num_layers=costs.num_blocks,
        num_micro_batches=replicas * micro_batches,
        between=_link(problem.cluster, problem.cluster.devices),
        boundary_bytes=rows * max(costs.boundary_bytes, default=0.0),
        before=_edge(costs.before, block, problem.cluster),
        after=_edge(costs.after, block, problem.cluster),
        replicas=(replicas,),
        schedule=problem.options.schedule,
        zero=problem.options.zero,
        freedom=Freedom(recompute=problem.options.recompute),
    )


def _of_one_source(problem: Problem) -> Problem:
    """Return the problem without figures that not all kinds have: alpha says nothing of one kind over another."""
    profile = replace(problem.profile, alpha=())
    if not all(profile.block_times(device.kind) for device in problem.cluster.devices):
        profile = replace(profile, times=())
    return replace(problem, profile=profile)


def _kind(problem: Problem, alike: Alike, rows: int, margin: float) -> ChipKind:
    cluster = replace(problem.cluster, devices=alike.devices)
    own = replace(problem, cluster=cluster)
    seconds = {size: alike.one.rate * layer_seconds(own, size, rows) for size in degrees(own)}
    return ChipKind(
        name=alike.name,
        nodes=tuple(Counter(device.node for device in alike.devices).values()),
        memory_bytes=margin * alike.memory_bytes * problem.options.memory_fraction,
        layers={size: _layer(problem, size, rows, took) for size, took in seconds.items() if took < math.inf},
        inside=problem.cluster.intra.between(*alike.devices),
        across=_link(problem.cluster, alike.devices),
        update_seconds_per_byte=optimizer_seconds(1.0, alike.one),
    )


def _layer(problem: Problem, size: int, rows: int, seconds: float) -> Layer:
    block, forward = _largest_block(problem), seconds / FORWARD_AND_BACKWARD
    return Layer(
        forward_seconds=forward,
        backward_seconds=seconds - forward,
        parameter_bytes=block.parameter_bytes_at(1 / size),
        kept_bytes=rows * block.activation_bytes_at(1 / size),
        input_bytes=rows * max(problem.costs.boundary_bytes, default=0.0),
    )


def _largest_block(problem: Problem) -> PartCosts:
    return max(problem.costs.blocks, key=lambda block: block.parameter_bytes + block.activation_bytes)


def _edge(part: PartCosts, block: PartCosts, cluster: Cluster) -> EndCosts:
    """Return what stands before or after the blocks, in blocks' worth, on the mean device."""
    flops_per_byte = fmean(device.flops_per_byte for device in cluster.devices)
    return EndCosts(
        work=_share(*(one.flops + one.traffic_bytes * flops_per_byte for one in (part, block))),
        parameters=_share(part.parameter_bytes, block.parameter_bytes),
        kept=_share(part.activation_bytes, block.activation_bytes),
    )


def _share(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0


def _link(cluster: Cluster, devices: Sequence[Device]) -> Link:
    """Return the slowest link that these devices have to use between them."""
    return (cluster.inter if len({device.node for device in devices}) > 1 else cluster.intra).between(*devices)


def shapes(problem: Problem) -> list[tuple[int, int]]:
    """Return (replicas, micro-batches of each) to try; few micro-batch counts where there are many devices.

    Where there are very many, those that are most like the best homogeneous plan.
    """
    count, rows, given = len(problem.cluster.devices), problem.costs.rows, problem.options.micro_batches
    counts = given if count <= EXHAUSTIVE_DEVICES else (given[len(given) // 2], given[-1])
    pairs = product(replica_counts(min(count, rows)), counts)
    found = sorted({(replicas, min(micro_batches, rows // replicas)) for replicas, micro_batches in pairs})
    even = min(candidates(problem), key=lambda one: one.seconds, default=None) if count > MANY_DEVICES else None
    if even is None:
        return found
    like = even.degrees.pipelines, even.micro_batches
    return sorted(found, key=lambda shape: (_unlike(shape, like), shape))[: max(1, MOST_WORK // count)]


def _unlike(shape: tuple[int, int], other: tuple[int, int]) -> float:
    """Return by how much the two numbers differ, as factors."""
    return sum(abs(math.log(own / given)) for own, given in zip(shape, other, strict=True))


def plans_of(problem: Problem, result: HeteroResult, micro_batches: int) -> Iterator[Plan]:
    """Yield the plans that run a result: with replicas of a stage side by side, and with stages of a replica."""
    options = problem.options
    for by_replica in (False, True):
        placed = _placed(problem.cluster, result, by_replica)
        pipelines = tuple(
            Pipeline(
                tuple(_stage(placed[i, number], stage) for i, stage in enumerate(result.stages)),
                micro_batches=micro_batches,
            )
            for number in range(result.replicas)
        )
        yield Plan(pipelines, options.schedule, options.zero, options.name, options.max_length)


def _stage(devices: tuple[int, ...], stage: HeteroStage) -> Stage:
    return Stage(devices, blocks=stage.layers, recompute=stage.layers if stage.recompute else 0)


def _placed(cluster: Cluster, result: HeteroResult, by_replica: bool) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the devices of each (stage, replica), larger groups first so that they leave no gaps in a node."""
    free = {alike.name: _by_node(alike) for alike in alike_in(cluster)}
    places = list(product(range(len(result.stages)), range(result.replicas)))
    degree = {place: result.stages[place[0]].groups.degree for place in places}
    order = sorted(places, key=lambda place: (-degree[place], *(place[::-1] if by_replica else place)))
    return {place: _taken(free[result.stages[place[0]].groups.kind.name], degree[place]) for place in order}


def _by_node(alike: Alike) -> list[list[int]]:
    nodes: dict[str, list[int]] = {}
    for device in alike.devices:
        nodes.setdefault(device.node, []).append(device.rank)
    return list(nodes.values())


def _taken(nodes: list[list[int]], size: int) -> tuple[int, ...]:
    """Take a group from the first node that has room for it."""
    node = next(ranks for ranks in nodes if len(ranks) >= size)
    taken = tuple(node[:size])
    del node[:size]
    return taken


def _find(problem: Problem) -> Candidates:
    found: dict[Plan, float] = {}
    tried = shapes(problem)
    for number, shape in enumerate(sorted(tried, key=lambda shape: (-shape[1], shape[0])), 1):
        problem.tell(f"heteroauto: {number} of {len(tried)}: {shape[0]} replicas, {shape[1]} micro-batches each")
        found |= _fitting(problem, *shape, below=_WORTH * min(found.values(), default=math.inf))
    return found


def _fitting(problem: Problem, replicas: int, micro_batches: int, below: float) -> dict[Plan, float]:
    """Return plans for one shape that fit memory, from the largest part of it for which there are some."""
    for margin in MARGINS:
        try:
            result = search_below(hetero_problem(problem, replicas, micro_batches, margin), below)
        except PlanError:
            return {}  # nothing is known of groups that some kind could form
        if result is None:
            return {}  # nor does anything fit in less memory
        priced = (problem.fitted(plan) for plan in plans_of(problem, result, micro_batches))
        fitting = dict(pair for pair in priced if pair is not None)
        if fitting:
            return fitting
    return {}


def _lacks(problem: Problem) -> str:
    kinds = alike_in(problem.cluster)
    if not problem.costs.num_blocks:
        return "it places repeated blocks, but the program has none"
    if not problem.options.pipelines:
        return "it makes pipelines, which the program cannot be cut into"
    if len(kinds) > MOST_CLASSES:
        return (
            f"it tells up to {MOST_CLASSES} kinds of devices apart, but these are of {len(kinds)} by kind, speed "
            f"and memory; use search 'malleus'"
        )
    return ""


HETEROAUTO = Search(
    name="heteroauto",
    applies="devices of several kinds: stages of each kind have layers and groups of their own",
    lacks=_lacks,
    find=_find,
)
