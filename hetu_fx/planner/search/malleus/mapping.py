"""Which group of a kind takes which place of a placement, by node first, then by what need not move; and the result.

Groups of one kind are interchangeable in time, not in traffic. For a layer whose copies stand on k nodes, the
gradient sync crosses k - 1 node boundaries every step:

    crossings = sum over layers of (nodes that hold it - 1)                                      (1)

A device that held [c, d) of the layers as slice q of t, and is to hold [a, b) as slice p of s, receives

    moved = (b - a) / s - |[a, b) and [c, d)| |[p/s, (p+1)/s) and [q/t, (q+1)/t)|                (2)

layers' worth of parameters and optimizer states; of a stage in chunks all that it held counts. Malleus fills places
with groups of the straggler's node first and takes the best overlap (IoU) second, place by place; here (1) and then (2)
are lowered by swaps between all groups of a kind until no swap helps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # whose parts are imported when they are first used

from hetu_fx.planner.search.malleus.device_groups import Group, GroupKind
from hetu_fx.planner.search.malleus.layers import FilledPipeline
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """A device's part of the model: layers [start, stop), slice `position` of `size`; `stage` tells stages apart."""

    start: int
    stop: int
    position: int
    size: int
    stage: int = 0

    @property
    def layers(self) -> float:
        """Return how many layers' worth it is."""
        return (self.stop - self.start) / self.size

    def shared(self, other: LayerSlice) -> float:
        """Return how many layers' worth both parts have in common."""
        layers = min(self.stop, other.stop) - max(self.start, other.start)
        below = min((self.position + 1) / self.size, (other.position + 1) / other.size)
        part = below - max(self.position / self.size, other.position / other.size)
        return max(0, layers) * max(0.0, part)


Holdings = Mapping[int, tuple[LayerSlice, ...]]
"""What each device holds, by rank: a part, or one for each chunk of its stage."""


def holdings(plan: Plan | None, num_layers: int) -> Holdings:
    """Return what each device holds under a plan (nothing without one); slices are taken as even."""
    result: dict[int, tuple[LayerSlice, ...]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for pipeline in plan.parts(num_layers) if plan is not None else ():
        for part, (start, stop) in zip(pipeline.parts, pipeline.ranges, strict=True):
            number = numbers.setdefault(part.devices, len(numbers))
            for position, rank in enumerate(part.devices):
                held = LayerSlice(start, stop, position, len(part.devices), number)
                result[rank] = (*result.get(rank, ()), held)
    return result


def order_ranks(ranks: Sequence[int], rates: Mapping[int, float], held: Holdings) -> list[int]:
    """Return a node's ranks, fastest first, equally fast ones such that stages can stay as they are.

    Those that hold nothing stay in the order that is given, so that groups stand below one switch. Stages whose devices
    are all of one rate come before those that cannot stay whole, and large ones before small ones, as groups of equal
    devices are cut; slices keep their order.
    """
    by_stage: dict[int, set[float]] = {}
    places = {rank: place for place, rank in enumerate(ranks)}
    for rank in ranks:
        if rank in held:
            by_stage.setdefault(held[rank][0].stage, set()).add(rates[rank])

    def key(rank: int) -> tuple[float, ...]:
        if rank not in held:
            return rates[rank], 2, places[rank]
        part = held[rank][0]
        return rates[rank], int(len(by_stage[part.stage]) > 1), -part.size, part.stage, part.position

    return sorted(ranks, key=key)


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """A stage that wants a group: its pipeline, the layers [start, stop) and the kind of group."""

    pipeline: int
    start: int
    stop: int
    kind: GroupKind


def wanted_groups(pipeline: int, filled: FilledPipeline) -> Iterator[WantedGroup]:
    """Yield the stages of a pipeline that want groups."""
    start = 0
    for kind, count in zip(filled.kinds, filled.layers, strict=True):
        yield WantedGroup(pipeline, start, start + count, kind)
        start += count


def moved_layers(devices: Sequence[int], start: int, stop: int, held: Holdings) -> float:
    """Return (2) over the devices of a group, in order of their slices."""
    new = {rank: LayerSlice(start, stop, position, len(devices)) for position, rank in enumerate(devices)}
    return math.fsum(part.layers - sum(map(part.shared, held.get(rank, ()))) for rank, part in new.items())


def crossings(nodes_of_layers: Sequence[Counter[int]]) -> int:
    """Return (1)."""
    return sum(max(0, len(nodes) - 1) for nodes in nodes_of_layers)


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """A group for each place, and the sums (1) and (2)."""

    groups: tuple[Group, ...]
    crossings: int
    moved_layers: float


def map_groups(places: Sequence[WantedGroup], groups: Sequence[Group], held: Holdings) -> GroupMapping:
    """Return a group of its kind for each place, with few crossings (1) and, among those, little moved (2).

    The better of two descents: from places in order of layers filled node by node, and, where something is held, from
    the least moved.
    """
    starts = (_least_moved, _node_by_node) if held else (_node_by_node,)
    found = [_Assignment(places, start(places, groups, held), held).improved() for start in starts]
    return min(found, key=lambda mapped: (mapped.crossings, mapped.moved_layers))


def _least_moved(places: Sequence[WantedGroup], groups: Sequence[Group], held: Holdings) -> list[Group]:
    chosen: dict[int, Group] = {}
    for kind in sorted({place.kind for place in places}):
        indices = [i for i, place in enumerate(places) if place.kind == kind]
        candidates = sorted((g for g in groups if g.kind == kind), key=lambda g: g.devices)
        costs = [[_moved(g, places[i], held) for g in candidates] for i in indices]
        for row, column in zip(*scipy.optimize.linear_sum_assignment(np.array(costs)), strict=True):
            chosen[indices[row]] = candidates[column]
    return [chosen[i] for i in range(len(places))]


def _node_by_node(places: Sequence[WantedGroup], groups: Sequence[Group], held: Holdings) -> list[Group]:
    """Fill places by their first layer with nodes by the layers that they held."""
    starts: dict[int, list[int]] = {}
    for group in groups:
        starts.setdefault(group.node, []).extend(part.start for rank in group.devices for part in held.get(rank, ()))
    means = {node: math.fsum(layers) / max(1, len(layers)) for node, layers in starts.items()}
    left: dict[GroupKind, deque[Group]] = {}
    for group in sorted(groups, key=lambda group: (means[group.node], group.node, group.devices)):
        left.setdefault(group.kind, deque()).append(group)
    order = sorted(range(len(places)), key=lambda i: (places[i].start, places[i].pipeline))
    chosen = {i: left[places[i].kind].popleft() for i in order}
    return [chosen[i] for i in range(len(places))]


def _moved(group: Group, place: WantedGroup, held: Holdings) -> float:
    return moved_layers(group.devices, place.start, place.stop, held)


class _Assignment:
    """Groups in places, with the nodes that hold each layer."""

    def __init__(self, places: Sequence[WantedGroup], groups: list[Group], held: Holdings) -> None:
        self._places, self.groups, self._held = places, groups, held
        self._nodes: list[Counter[int]] = [Counter() for _ in range(max(place.stop for place in places))]
        for place, group in zip(places, groups, strict=True):
            for layer in range(place.start, place.stop):
                self._nodes[layer][group.node] += 1

    def improved(self) -> GroupMapping:
        """Swap groups of a kind as long as that lowers crossings, or else what is moved; return what it comes to."""
        while any([self._swap_if_better(i, j) for i, j in self._pairs()]):
            pass
        pairs = zip(self.groups, self._places, strict=True)
        moved = math.fsum(_moved(group, place, self._held) for group, place in pairs)
        return GroupMapping(tuple(self.groups), crossings(self._nodes), moved)

    def _swap_if_better(self, i: int, j: int) -> bool:
        is_better = self._gain(i, j) < (0, -1e-9)
        if is_better:
            self._swap(i, j)
        return is_better

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of places that could gain by a swap: where nothing is held, traffic is all there is to it."""
        kinds, ranges = dict[GroupKind, int](), dict[tuple[int, int], int]()
        kind = np.array([kinds.setdefault(place.kind, len(kinds)) for place in self._places])
        layers = np.array([ranges.setdefault((place.start, place.stop), len(ranges)) for place in self._places])
        for i in range(len(self._places)):
            gains = kind[i + 1 :] == kind[i]
            if not self._held:
                gains &= layers[i + 1 :] != layers[i]
            yield from ((i, i + 1 + j) for j in np.flatnonzero(gains).tolist())

    def _gain(self, i: int, j: int) -> tuple[int, float]:
        """Return the change of (1) and of (2) when two places swap their groups."""
        is_near = self.groups[i].node == self.groups[j].node
        change = 0 if is_near else self._exchanged(i, j) + self._exchanged(j, i)  # layers of both stay as they are
        if change > 0 or not self._held:
            return change, 0.0
        one, other = self.groups[i], self.groups[j]
        before = _moved(one, self._places[i], self._held) + _moved(other, self._places[j], self._held)
        return change, _moved(other, self._places[i], self._held) + _moved(one, self._places[j], self._held) - before

    def _exchanged(self, i: int, j: int) -> int:
        """Return by how much (1) grows on the layers of place i alone when it gets the group of place j."""
        gone, new, other = self.groups[i].node, self.groups[j].node, self._places[j]
        layers = range(self._places[i].start, self._places[i].stop)
        counts = [self._nodes[layer] for layer in layers if not other.start <= layer < other.stop]
        return sum((new not in nodes) - (nodes[gone] == 1) for nodes in counts)

    def _swap(self, i: int, j: int) -> None:
        self.groups[i], self.groups[j] = self.groups[j], self.groups[i]
        for index, gone in ((i, self.groups[j]), (j, self.groups[i])):
            for layer in range(self._places[index].start, self._places[index].stop):
                self._nodes[layer][self.groups[index].node] += 1
                self._nodes[layer][gone.node] -= 1
                if not self._nodes[layer][gone.node]:
                    del self._nodes[layer][gone.node]


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
