"""Plan around stragglers as Malleus does: groups, pipelines, layers and micro-batches, on two levels.

Minimise T = max_i m_i max_j y_ij l_ij, the steady seconds of the slowest pipeline, over how devices form
groups, groups pipelines, layers stages, and micro-batches pipelines (Malleus, SIGMOD 2025, DOI
10.1145/3725322, and its released planner; each module says where it leaves that). The upper level is here and
in `groups` and `placement`; the lower level, exact, in `layers` and `allocate`.

Groupings of all nodes are tried in order of their capacity sum 1 / y. A grouping of capacity C takes at least

    M L / C                                                                                      (1)

so the search ends when that is no less than the best T. The number of pipelines and the largest degree stay
as they are given, as in the released planner. The result is a function of the arguments alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.malleus.groups import (
    Grouping,
    ignoring_stragglers,
    leaving_out_stragglers,
    node_groupings,
)
from hetu_fx.planner.search.malleus.layers import Filled
from hetu_fx.planner.search.malleus.mapping import Holdings, Mapped, WantedGroup, holdings, map_groups, regrouped
from hetu_fx.planner.search.malleus.placement import Placement, Placer
from hetu_fx.planner.search.malleus.situation import MalleusSituation
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction

MOST_GROUPINGS = 48
"""So many groupings of all nodes, besides the two that ignore and that leave out stragglers, are placed."""


@dataclass(frozen=True, slots=True)
class MalleusStage:
    """A tensor parallel group with its layers; `layer_seconds` is y, for one layer and one micro-batch."""

    devices: tuple[int, ...]
    layers: int
    layer_seconds: float

    @property
    def seconds(self) -> float:
        """Return y l, for one micro-batch."""
        return self.layers * self.layer_seconds


@dataclass(frozen=True, slots=True)
class MalleusPipeline:
    """Stages one after another, and how many micro-batches go through them."""

    stages: tuple[MalleusStage, ...]
    micro_batches: int

    @property
    def bottleneck_seconds(self) -> float:
        """Return o = max y l, for one micro-batch."""
        return max(stage.seconds for stage in self.stages)

    @property
    def steady_seconds(self) -> float:
        """Return m o, what the pipeline takes when filling and draining it are left out."""
        return self.micro_batches * self.bottleneck_seconds

    @property
    def step_seconds(self) -> float:
        """Return (m - 1) o + sum y l, with filling and draining."""
        return (self.micro_batches - 1) * self.bottleneck_seconds + math.fsum(s.seconds for s in self.stages)

    @property
    def capacity(self) -> float:
        """Return sum 1 / y."""
        return math.fsum(1 / stage.layer_seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class MalleusResult:
    """The best assignment that was found.

    Attributes:
        pipelines: stages of devices with layers, and micro-batches.
        standby: ranks that hold nothing, in order; they may join again when they are faster.
        least_seconds: a lower bound of `objective` for the grouping that has the largest capacity.
        is_exact: whether no placement of the groupings that were tried is better (else: none was found).
        crossings: node boundaries that gradient sync crosses, summed over layers.
        moved_layers: layers' worth of parameters that devices receive, coming from the plan before.
        num_pipelines_tried: different pipelines that were filled with layers.
    """

    pipelines: tuple[MalleusPipeline, ...]
    standby: tuple[int, ...]
    least_seconds: float
    is_exact: bool
    crossings: int
    moved_layers: float
    num_pipelines_tried: int

    @property
    def objective(self) -> float:
        """Return T = max_i m_i max_j y_ij l_ij in seconds, what the search lowers."""
        return max(pipeline.steady_seconds for pipeline in self.pipelines)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step, with filling and draining of the pipelines."""
        return max(pipeline.step_seconds for pipeline in self.pipelines)

    @property
    def why(self) -> str:
        """Return what bounds the step, in a sentence."""
        i, pipeline = max(enumerate(self.pipelines), key=lambda pair: (pair[1].steady_seconds, -pair[0]))
        stage = max(pipeline.stages, key=lambda stage: stage.seconds)
        above = 100 * (self.objective / self.least_seconds - 1)
        return (
            f"bound by pipeline {i}: {pipeline.micro_batches} micro-batches x {stage.layers} layers x "
            f"{stage.layer_seconds:.4g} s on devices {list(stage.devices)}; {above:.1f} % above what work split "
            f"at will would take"
        )

    def to_plan(self, name: str | None = None) -> Plan:
        """Return the plan that runs this: 1F1B, a row share per micro-batch."""
        pipelines = tuple(
            Pipeline(
                tuple(Stage(stage.devices, blocks=stage.layers) for stage in pipeline.stages),
                share=pipeline.micro_batches,
                micro_batches=pipeline.micro_batches,
            )
            for pipeline in self.pipelines
        )
        return Plan(pipelines, name=name, predicted=Prediction(self.step_seconds, why=self.why))


def search(situation: MalleusSituation, before: Plan | None = None, below: float = math.inf) -> MalleusResult:
    """Return the best assignment found for the situation.

    Args:
        situation: devices, rates, model and batch.
        before: the plan that runs now: of equally fast assignments, one that moves less is taken.
        below: seconds; assignments that take as long or longer are not looked for.

    Raises `PlanError` when nothing fits, with the way out, or nothing takes less than `below`.
    """
    held = holdings(before, situation.num_layers)
    nodes = [regrouped(ranks, situation.rates, held) for ranks in situation.nodes]
    placer = Placer(situation)
    best: tuple[Placement, Grouping] | None = None
    least = math.inf
    for grouping in _groupings(situation, nodes):
        bound = situation.num_micro_batches * situation.num_layers / grouping.capacity if grouping.groups else math.inf
        least = min(least, bound)
        limit = best[0].seconds if best else below
        if bound < limit and (placement := placer.place(grouping.kinds, limit)) is not None:
            best = placement, grouping
    if best is None:
        raise PlanError(_nothing_fits(situation) if below == math.inf else f"no assignment takes less than {below} s")
    return _result(situation, *best, held, least, placer)


def _groupings(situation: MalleusSituation, nodes: Sequence[Sequence[int]]) -> Iterator[Grouping]:
    """Yield groupings of the cluster, largest capacity first, then those that ignore or leave out stragglers."""
    choices = [node_groupings(situation, ranks) for ranks in nodes]
    yield from islice(_by_capacity(choices), MOST_GROUPINGS)
    yield _joined(ignoring_stragglers(situation, ranks) for ranks in nodes)
    yield _joined(leaving_out_stragglers(situation, ranks) for ranks in nodes)


def _by_capacity(choices: Sequence[Sequence[Grouping]]) -> Iterator[Grouping]:
    """Yield one choice per node, joined, by falling capacity; what differs only in which node is left out."""
    first = (0,) * len(choices)
    heap = [(-math.fsum(options[0].capacity for options in choices), first)]
    queued, seen = {first}, set()
    while heap:
        _, picks = heapq.heappop(heap)
        grouping = _joined(options[pick] for options, pick in zip(choices, picks, strict=True))
        if grouping.kinds in seen:
            continue  # so are the ones after it, up to which node
        seen.add(grouping.kinds)
        yield grouping
        for node, options in enumerate(choices):
            following = (*picks[:node], picks[node] + 1, *picks[node + 1 :])
            if following[node] < len(options) and following not in queued:
                queued.add(following)
                capacities = (c[pick].capacity for c, pick in zip(choices, following, strict=True))
                heapq.heappush(heap, (-math.fsum(capacities), following))


def _joined(parts: Iterable[Grouping]) -> Grouping:
    together = tuple(parts)
    groups = tuple(group for part in together for group in part.groups)
    return Grouping(groups, tuple(sorted(rank for part in together for rank in part.standby)))


def _result(
    situation: MalleusSituation,
    placement: Placement,
    grouping: Grouping,
    held: Holdings,
    least: float,
    placer: Placer,
) -> MalleusResult:
    places = [place for index, filled in enumerate(placement.pipelines) for place in _places(index, filled)]
    mapped = map_groups(places, grouping.groups, held)
    pipelines = [
        MalleusPipeline(_stages(index, places, mapped), count) for index, count in enumerate(placement.micro_batches)
    ]
    used = {rank for group in mapped.groups for rank in group.devices}
    return MalleusResult(
        pipelines=tuple(sorted(pipelines, key=lambda pipeline: min(pipeline.stages[0].devices))),
        standby=tuple(rank for rank in situation.cluster.ranks if rank not in used),
        least_seconds=least,
        is_exact=placer.is_exact,
        crossings=mapped.crossings,
        moved_layers=mapped.moved_layers,
        num_pipelines_tried=placer.filler.num_filled,
    )


def _places(pipeline: int, filled: Filled) -> Iterator[WantedGroup]:
    start = 0
    for kind, count in zip(filled.kinds, filled.layers, strict=True):
        yield WantedGroup(pipeline, start, start + count, kind)
        start += count


def _stages(pipeline: int, places: Sequence[WantedGroup], mapped: Mapped) -> tuple[MalleusStage, ...]:
    return tuple(
        MalleusStage(group.devices, place.stop - place.start, group.kind.seconds)
        for place, group in zip(places, mapped.groups, strict=True)
        if place.pipeline == pipeline
    )


def _nothing_fits(situation: MalleusSituation) -> str:
    need = situation.num_layers * situation.memory.at(0) if situation.memory is not None else 0.0
    return (
        f"no assignment of {situation.num_layers} layers and {situation.num_micro_batches} micro-batches to "
        f"{situation.num_pipelines} pipelines on devices {list(situation.cluster.ranks)} with groups of up to "
        f"{situation.degrees[0]}: every pipeline needs a group, {need / 1e6:.4g} MB for its layers, and a "
        f"micro-batch per stage; use fewer pipelines, smaller groups, more micro-batches, or more devices"
    )
