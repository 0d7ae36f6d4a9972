"""The HeteroAuto search, as the table of searches knows it: plans for unlike kinds of chips as H2's HeteroAuto does.

HeteroAuto (`search`) makes equal pipelines over all kinds, as many replicas of one as there are groups of the kind that
has fewest. Which number of replicas, and of micro-batches, is best is found here, in order of its lower bounds. And as
kinds may stand in unlike numbers, or work better apart, the cluster is cut in regions first (`search.regions`): each
has its own replicas of its own pipeline, and rows so that all end together. The cost model that all searches share says
which plan is best.

HeteroAuto recomputes all layers of a stage or none; what is planned is the least of them that fits memory.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from hetu_fx.cluster.cluster import Cluster, Device, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.price.step_end import optimizer_seconds
from hetu_fx.planner.search.cluster_regions import CLASSES, MOST_CLASSES, estimate_templates
from hetu_fx.planner.search.device_orders import Groups, LikeDevices, devices_by_likeness, ranks_by_node, take_group
from hetu_fx.planner.search.estimates import Blocks, replica_rules
from hetu_fx.planner.search.heteroauto.chip_cost import HeteroResult, throughput_bound
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer, SearchSpace
from hetu_fx.planner.search.heteroauto.search import OuterLevel
from hetu_fx.planner.search.homogeneous import price_best_plans, stage_counts
from hetu_fx.planner.search.malleus.adapter import degrees, layer_line
from hetu_fx.planner.search.problem import Problem, Search, in_all_splits
from hetu_fx.planner.search.replica import Family
from hetu_fx.planner.search.templates import FREE_SIZES, Queued, Region, Template, TemplateRegion, Templates
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.part_costs import PartCosts

LESS_MEMORY = (0.85, 0.7)
"""Parts of the memory to plan for where nothing fits with all of it: passing buffers are not in HeteroAuto's."""

_WORTH = 1.03  # what HeteroAuto's own prices say is slower than the best of a region by this factor is not tried

_WORTH_ALONE = 1.15  # the same where a region is of one kind, which takes little to search


Shape = tuple[int, int]
"""Replicas, and the micro-batches of each."""


def shapes(problem: Problem) -> list[Shape]:
    """Return the shapes to try: replicas by how many groups of a kind one of them may have."""
    rows, options, kinds = problem.costs.rows, problem.options, devices_by_likeness(problem.cluster)
    groups = {len(kind.devices) // size for kind in kinds for size in degrees(problem)}
    counts = {min(rows, n // stages) for n in groups if n for stages in stage_counts(n, problem.costs.num_blocks)}
    return sorted({(replicas, min(m, rows // replicas)) for replicas in counts for m in options.micro_batches})


_FREE_KINDS = 4  # where there are more, groups of all kinds have one size


class HeteroProblems:
    """What HeteroAuto plans for with each number of replicas and micro-batches.

    Seconds of a layer come from measured times if there are some of every kind, else from the cost model, so that kinds
    are compared by figures of one source.
    """

    def __init__(self, problem: Problem, known: dict[tuple[str, bool], ChipCosts] | None = None) -> None:
        """Kinds that are known from other parts of the cluster may be given, to which those of this one are added.

        Raises `PlanError` where nothing is known of groups that some kind can form.
        """
        costs, cluster = problem.costs, problem.cluster
        self._problem = problem
        asked, known, self._kinds = _of_one_source(problem), {} if known is None else known, list[ChipCosts]()
        for alike in devices_by_likeness(cluster):
            key = alike.name, bool(asked.profile.times)  # problems may differ in their clusters, and in what counts
            if key not in known:
                known[key] = ChipCosts.of(asked, alike)
            self._kinds.append(known[key])
        self._between = _link(cluster, cluster.devices)
        self._edges = [_edge(part, _largest_block(problem), cluster) for part in (costs.before, costs.after)]

    def of(self, replicas: int, micro_batches: int, margin: float = 1.0) -> HeteroProblem:
        """Return the problem in which each replica has so many micro-batches, within a part of the memory."""
        costs, options = self._problem.costs, self._problem.options
        rows = math.ceil(costs.rows / (replicas * micro_batches))
        return HeteroProblem(
            kinds=tuple(kind.at(rows, margin) for kind in self._kinds),
            num_layers=costs.num_blocks,
            num_micro_batches=replicas * micro_batches,
            between=self._between,
            boundary_bytes=rows * max(costs.boundary_bytes, default=0.0),
            before=self._edges[0],
            after=self._edges[1],
            replicas=(replicas,),
            schedule=options.schedule,
            zero=options.zero,
            freedom=SearchSpace(recompute=options.recompute, degree_per_kind=len(self._kinds) <= _FREE_KINDS),
            state=costs.state,
        )


def _of_one_source(problem: Problem) -> Problem:
    """Return the problem without figures that not all kinds have: alpha says nothing of one kind over another."""
    profile = replace(problem.profile, alpha=())
    if not all(profile.block_times(device.kind) for device in problem.cluster.devices):
        profile = replace(profile, times=())
    return replace(problem, profile=profile)


@dataclass(frozen=True)
class ChipCosts:
    """A kind of chips for micro-batches of one row, and what a layer takes by their rows, for each size of groups."""

    for_a_row: ChipKind
    lines: Mapping[int, Line]

    @classmethod
    def of(cls, problem: Problem, alike: LikeDevices) -> ChipCosts:
        """Return the kind of devices that are alike. Raises `PlanError` where nothing is known of groups of them."""
        own, rate = replace(problem, cluster=replace(problem.cluster, devices=alike.devices)), alike.one.rate
        found = [(size, layer_line(own, size)) for size in degrees(own)]
        lines = {size: Line(rate * line.fixed, rate * line.slope) for size, line in found if line.fixed < math.inf}
        kind = ChipKind(
            name=alike.name,
            nodes=tuple(map(len, ranks_by_node(alike.devices, problem.cluster).values())),
            memory_bytes=alike.memory_bytes * problem.options.memory_fraction,
            layers={size: _layer(problem, size, line) for size, line in lines.items()},
            inside=problem.cluster.intra.between(*alike.devices),
            across=_link(problem.cluster, alike.devices),
            update_seconds_per_byte=optimizer_seconds(1.0, alike.one),
        )
        return cls(kind, lines)

    def at(self, rows: int, margin: float) -> ChipKind:
        """Return the kind for micro-batches of so many rows, with a part of its memory."""
        layers = {size: _of_rows(layer, self.lines[size], rows) for size, layer in self.for_a_row.layers.items()}
        return replace(self.for_a_row, memory_bytes=margin * self.for_a_row.memory_bytes, layers=layers)


def _layer(problem: Problem, size: int, line: Line) -> Layer:
    """Return a layer on a group, for micro-batches of one row."""
    block, forward = _largest_block(problem), line(1) / FORWARD_AND_BACKWARD
    return Layer(
        forward_seconds=forward,
        backward_seconds=line(1) - forward,
        parameter_bytes=block.parameter_bytes_at(1 / size),
        kept_bytes=block.activation_bytes_at(1 / size),
        input_bytes=max(problem.costs.boundary_bytes, default=0.0),
    )


def _of_rows(layer: Layer, line: Line, rows: int) -> Layer:
    """Return a layer for micro-batches of so many rows instead of one."""
    forward = line(rows) / FORWARD_AND_BACKWARD
    kept, entering = rows * layer.kept_bytes, rows * layer.input_bytes
    return Layer(forward, line(rows) - forward, layer.parameter_bytes, kept, entering)


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


class HeteroTemplates(Templates):
    """The templates of each region that HeteroAuto finds, in place of those of groups of one size in equal numbers."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._whole, self._rules = problem, replica_rules(problem, problem.options.zero)
        self._unlike: dict[Region, list[Template]] = {}
        self._families: dict[Hashable, Family] = {}
        self._kinds: dict[tuple[str, bool], ChipCosts] = {}

    def queue(self, place: TemplateRegion) -> Iterator[Queued]:
        """Yield the templates that are found."""
        rows = self.rows_of(place.region)
        for one in self._unlike_of(place.region):
            made = Template.of(one.pipelines, one.family, self.estimates, place.zero, is_alone=place.is_alone)
            if (seconds := made.step_seconds(rows)) < math.inf:
                yield seconds, made

    def _unlike_of(self, region: Region) -> list[Template]:
        """Return what is found for a region, fastest first, of alike pipelines one."""
        if region not in self._unlike:
            count = len(self.classes)
            self._whole.tell("heteroauto: regions", len(self._unlike), count * (count + 1) // 2)
            part = self._part(region)
            rows = part.costs.rows
            unlike: dict[Hashable, Template] = {}
            for one in sorted(self._searched(part), key=lambda one: one.step_seconds(rows)):
                unlike.setdefault((self.estimates.kinds.key(one.pipelines[0]), len(one.pipelines)), one)
            self._unlike[region] = list(unlike.values())
        return self._unlike[region]

    def _part(self, region: Region) -> Problem:
        """Return the problem of a region alone."""
        ranks = {device.rank for number in region for device in self.classes[number]}
        devices = tuple(device for device in self._whole.cluster.devices if device.rank in ranks)
        rows = self._whole.profile.with_rows(self.rows_of(region))
        return replace(self._whole, cluster=replace(self._whole.cluster, devices=devices), profile=rows)

    def _searched(self, part: Problem) -> Iterator[Template]:
        """Yield what is found for each shape, in order of what they take at least."""
        below, worth = math.inf, _WORTH if len(devices_by_likeness(part.cluster)) > 1 else _WORTH_ALONE
        try:
            problems = HeteroProblems(part, self._kinds)
            queue = [(throughput_bound(problems.of(*shape), shape[0]), False, shape) for shape in shapes(part)]
        except PlanError:
            return  # nothing is known of groups that some kind could form
        heapq.heapify(queue)
        uppers: dict[Shape, OuterLevel] = {}
        while queue and queue[0][0] < below and not part.time_limit.ends(below < math.inf):
            _, is_bounded, shape = heapq.heappop(queue)
            if not is_bounded:
                uppers[shape] = uppers.get(shape) or OuterLevel(problems.of(*shape))
                heapq.heappush(queue, (*uppers[shape].next_bound(), shape))
                continue
            all_memory = uppers.pop(shape)
            parts = itertools.chain([all_memory], (OuterLevel(problems.of(*shape, margin)) for margin in LESS_MEMORY))
            seconds, fitting = self._fitting(part, parts, below)
            below = min(below, worth * seconds)
            yield from fitting

    def _fitting(self, part: Problem, uppers: Iterable[OuterLevel], below: float) -> tuple[float, list[Template]]:
        """Return the best of one shape with their least seconds, from the most memory for which some fit."""
        for upper in uppers:
            results = upper.near_below(below)
            if not results:
                break  # nor does anything fit in less memory
            made = itertools.chain.from_iterable(self._templates(part, result) for result in results)
            fitting = [template for template in made if template.seconds(part.costs.rows) < math.inf]
            if fitting:
                return results[0].seconds, fitting
        return math.inf, []

    def _templates(self, part: Problem, result: HeteroResult) -> Iterator[Template]:
        """Yield a result with replicas of a stage side by side and with stages of a replica.

        Each with the layers that it has and with those that the shared cost model would give to its stages.
        """
        rows = math.ceil(part.costs.rows / result.replicas)
        layers = tuple(stage.layers for stage in result.stages)
        for pipelines in dict.fromkeys(_pipelines(part.cluster, result, by_replica) for by_replica in (False, True)):
            dealt = self.estimates.family(pipelines[0], result.replicas, rows)
            found = self._family(pipelines[0], layers, result.replicas), dealt
            unlike = {family.replica.blocks: family for family in found if family is not None}
            for family in unlike.values():
                yield Template.of(pipelines, family, self.estimates, self._rules.zero)

    def _family(self, groups: Groups, blocks: Blocks, replicas: int) -> Family:
        key = self.estimates.kinds.key(groups), blocks, replicas
        if key not in self._families:
            self._families[key] = Family(self.estimates.replica(groups, blocks), replicas, self._rules)
        return self._families[key]


class AllTemplates(HeteroTemplates):
    """The templates of groups of one size in equal numbers, and, where many kinds mix, those that HeteroAuto finds.

    For some two kinds of several the former have groups of any two sizes, and little is left to find.
    """

    def queue(self, place: TemplateRegion) -> Iterator[Queued]:
        """Yield both."""
        if len(place.region) > FREE_SIZES or 1 < len(place.region) == len(self.classes):
            yield from super().queue(place)
        yield from Templates.queue(self, place)


def _pipelines(cluster: Cluster, result: HeteroResult, by_replica: bool) -> tuple[Groups, ...]:
    """Return the groups of each replica."""
    placed = placed_groups(cluster, result, by_replica)
    return tuple(
        tuple([placed[stage, replica] for stage in range(len(result.stages))]) for replica in range(result.replicas)
    )


def placed_groups(cluster: Cluster, result: HeteroResult, by_replica: bool) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the devices of each (stage, replica), larger groups first so that they leave no gaps in a node."""
    free = {alike.name: list(ranks_by_node(alike.devices, cluster).values()) for alike in devices_by_likeness(cluster)}
    places = list(product(range(len(result.stages)), range(result.replicas)))
    degree = {place: result.stages[place[0]].groups.degree for place in places}
    order = sorted(places, key=lambda place: (-degree[place], *(place[::-1] if by_replica else place)))
    return {place: take_group(free[result.stages[place[0]].groups.kind.name], degree[place]) for place in order}


def _lacks(problem: Problem) -> str:
    kinds = devices_by_likeness(problem.cluster)
    if not problem.costs.num_blocks:
        return "it places repeated blocks, but the program has none"
    if not problem.options.pipelines:
        return "it makes pipelines, which the program cannot be cut into"
    if len(kinds) > MOST_CLASSES:
        return (
            f"it tells up to {MOST_CLASSES} kinds of devices apart, but these are of {len(kinds)} by kind, speed "
            f"and memory\nhint: use search 'malleus'"
        )
    return ""


HETEROAUTO = Search(
    name="heteroauto",
    applies="devices of several kinds: stages of each kind have layers and groups of their own",
    lacks=_lacks,
    find=lambda problem: price_best_plans(estimate_templates(problem, HeteroTemplates(problem)), problem),
)

KINDS = Search(
    name="kinds",
    applies="devices of several kinds: what 'classes' and 'heteroauto' propose for each region, in any mixture",
    lacks=lambda problem: HETEROAUTO.lacks(problem) or CLASSES.lacks(problem),
    find=in_all_splits(lambda problem: price_best_plans(estimate_templates(problem, AllTemplates(problem)), problem)),
)
