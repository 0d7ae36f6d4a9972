"""Seconds and bytes of a pipeline over kinds of chips (H2's cost model), and lower bounds of them.

Stage k of a pipeline takes s_k seconds for forward and backward of a micro-batch, what it hands over included, and
u_k seconds at the end of the step to sync gradients, update and gather parameters. With m micro-batches a step takes

    T = max_k [ m s_k + bubble x (sum of s_j over the other stages j) + u_k ]                          (1)

which for equal stages and 1F1B (bubble 1) is the usual (m + p - 1) s. A stage that computes its activations again
adds the recomputed share of its forward to s_k. A chip of a stage at which f micro-batches are in flight holds

    states(l) + f l kept                        or, where activations are computed again,              (2)
    states(l) + f l input + one layer's kept                                                           (3)

Both messages between two stages are charged to the one in front. A message of S bytes to a group of b chips from one
of a takes, with every receiver getting all of it over its own link, or with min(a, b) slices that are gathered inside
the receiving node (SR&AG),

    latency + max(1, b / a) S / link        or        latency + S / min(a, b) / link + gather(S, b)    (4)

whichever is less.

Stages are priced for all numbers of layers and places in a pipeline at once. Rows are places counted from the end: a
stage in row q is followed by q - 1 others, which says how many micro-batches it has in flight. Columns are layers. A
stage whose activations fit keeps them, as computing them again is never faster; one where only inputs fit recomputes;
else it takes infinitely long.

What no arrangement of given groups is faster than leaves out the order of the groups, and what the first stage has
before the layers; each stage but the last hands over to the groups that it reaches fastest, and the j-th stage of some
groups is at least the j-th from the end. Then for a limit B on the maximum of (1) each stage takes so many layers at
most, all of them together have to take all, and the sum is least where the layers that add least to it are filled
first. So the bound is min_B B + sum(B), over all B that some stage can have; where these are many, some stand for those
above them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, EndCosts, HeteroProblem, Layer
from hetu_fx.planner.values.device_memory import fixed_terms, in_flight

NOTHING = EndCosts()
Numbers = NDArray[np.float64]
Columns = NDArray[np.int64]
Amount = TypeVar("Amount", float, Numbers)
"""A number, or many at once."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Tensor parallel groups of one kind and size."""

    kind: ChipKind
    degree: int

    def __hash__(self) -> int:
        return hash((self.kind.name, self.degree))  # asked for millions of times

    @property
    def layer(self) -> Layer:
        """Return what a layer costs on one of them."""
        return self.kind.layers[self.degree]


@dataclass(frozen=True, slots=True)
class HeteroStage:
    """A stage: the groups that it stands on, one for each replica, its layers, and if they are computed again."""

    groups: Groups
    layers: int
    recompute: bool = False

    def __str__(self) -> str:
        again = " again" if self.recompute else ""
        return f"{self.groups.kind.name}/{self.groups.degree}x{self.layers}{again}"


def edge_costs(problem: HeteroProblem, is_first: bool, is_last: bool) -> EndCosts:
    """Return what a stage holds besides layers."""
    nothing = EndCosts()
    return (problem.before if is_first else nothing) + (problem.after if is_last else nothing)


def work_seconds(groups: Groups, layers: Amount, edge: EndCosts, recompute: bool) -> Amount:
    """Return forward and backward of a micro-batch."""
    layer = groups.layer
    again = groups.kind.recomputed_share * layer.forward_seconds if recompute else 0.0
    return (layers + edge.work) * (layer.forward_seconds + layer.backward_seconds + again)


def held_bytes(problem: HeteroProblem, replicas: int, stage: HeteroStage, edge: EndCosts, flying: int) -> float:
    """Return (2) or (3) of a chip."""
    states = state_bytes(problem, replicas, stage.groups, float(stage.layers), edge)
    return states + activation_bytes(stage.groups.layer, float(stage.layers), edge, float(flying), stage.recompute)


def state_bytes(problem: HeteroProblem, replicas: int, groups: Groups, layers: Amount, edge: EndCosts) -> Amount:
    """Return the bytes of parameters, gradients and optimizer states that a chip holds."""
    parameters = groups.layer.parameter_bytes * (layers + edge.parameters)
    held = [np.ceil(count) for _, count in fixed_terms(parameters, problem.zero, replicas, problem.state)]
    return cast(Amount, sum(held))


def activation_bytes(layer: Layer, layers: Amount, edge: EndCosts, flying: Amount, recompute: bool) -> Amount:
    """Return the bytes that a chip keeps for the backward of so many micro-batches in flight."""
    if recompute:
        return flying * layers * layer.input_bytes + max(1.0, edge.kept) * layer.kept_bytes
    return flying * (layers + edge.kept) * layer.kept_bytes


def update_seconds(problem: HeteroProblem, replicas: int, groups: Groups, layers: Amount, edge: EndCosts) -> Amount:
    """Return the seconds of gradient sync (and gather of parameters: two turns around the replicas) and update."""
    held = (layers + edge.parameters) * groups.layer.parameter_bytes
    link = groups.kind.across
    turn = (replicas - 1) * (link.latency_seconds + held / (replicas * link.bytes_per_second))
    owned = held / (replicas if problem.zero else 1)
    return 2 * turn + owned * groups.kind.update_seconds_per_byte


def hand_over_seconds(problem: HeteroProblem, front: Groups, behind: Groups) -> float:
    """Return the seconds in which a stage sends a micro-batch to the one behind, and gets its gradient."""
    link = front.kind.across if front.kind == behind.kind else problem.between
    return sum(
        transfer_seconds(problem, source.degree, target, link) for source, target in ((front, behind), (behind, front))
    )


def transfer_seconds(problem: HeteroProblem, senders: int, target: Groups, link: Link) -> float:
    """Return (4) for a micro-batch's boundary."""
    size, receivers = problem.boundary_bytes, target.degree
    whole = link.seconds(max(1.0, receivers / senders) * size)
    if not problem.freedom.slice_and_gather:
        return whole
    inside = target.kind.inside
    gather = (receivers - 1) * inside.seconds(size / receivers)
    return min(whole, link.seconds(size / min(senders, receivers)) + gather)


@dataclass(frozen=True, slots=True)
class HeteroResult:
    """The best plan that was found.

    Attributes:
        replicas: data parallel degree: so many copies of the pipeline, each on groups of its own.
        stages: the pipeline, first stage first.
        seconds: predicted seconds of a step.
        coarse_seconds: those of the best plan in which every kind has groups of one size, which is proved.
        num_arranged: for how many choices of groups the lower level was solved.
    """

    replicas: int
    stages: tuple[HeteroStage, ...]
    seconds: float
    coarse_seconds: float
    num_arranged: int

    @property
    def chips(self) -> Mapping[str, int]:
        """Return how many chips of each kind are used."""
        count: Counter[str] = Counter()
        for stage in self.stages:
            count[stage.groups.kind.name] += self.replicas * stage.groups.degree
        return count

    def __str__(self) -> str:
        return f"{self.replicas} x " + " > ".join(map(str, self.stages))


@dataclass(frozen=True, slots=True)
class Costs:
    """By place and layers, the two sides of (1).

    `share` is what a stage adds to the bubble's sum, `bound` the rest of the step if it is the slowest. Both grow with
    the layers.
    """

    share: Numbers
    bound: Numbers

    def within(self, limit: float) -> Numbers:
        """Return the shares, infinite for stages whose bound is above the limit."""
        return np.where(self.bound <= limit, self.share, np.inf)


@dataclass(frozen=True, slots=True)
class StageGroups:
    """Groups that hold a stage, those of the stage behind (None at the end), and if it is the pipeline's first."""

    groups: Groups
    behind: Groups | None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Groups that may hold stages one after another, up to so many."""

    groups: Groups
    most_stages: int


class Tables:
    """Costs of stages for one number of replicas and up to so many stages; remembers what it worked out."""

    def __init__(self, problem: HeteroProblem, replicas: int, most_stages: int) -> None:
        self.problem, self.replicas = problem, replicas
        self._count = problem.num_micro_batches // replicas
        self._layers = np.arange(problem.num_layers + 1, dtype=np.float64)[None, :]
        flying = [in_flight(problem.schedule, 0, row, self._count) for row in range(1, most_stages + 1)]
        self._flying = np.array([0.0, *flying])[:, None]
        self._costs: dict[StageGroups, Costs] = {}
        self._work: dict[tuple[Groups, EndCosts], Numbers] = {}
        self._least: dict[tuple[Groups, float, EndCosts], Numbers] = {}

    def costs(self, place: StageGroups) -> Costs:
        """Return the costs of stages at a place."""
        if place not in self._costs:
            edge = edge_costs(self.problem, place.is_first, place.behind is None)
            behind = 0.0 if place.behind is None else hand_over_seconds(self.problem, place.groups, place.behind)
            seconds = self._seconds(place.groups, edge) + behind
            share = _times(self.problem.bubble, seconds)
            self._costs[place] = Costs(share, self._bound(place.groups, edge, seconds))
        return self._costs[place]

    def least_bounds(self, groups: Groups, hand_over: float, edge: EndCosts = NOTHING) -> Numbers:
        """Return bounds that no place is below which has that edge at least, and hands over in so many seconds."""
        key = groups, hand_over, edge
        if key not in self._least:
            self._least[key] = self._bound(groups, edge, self._seconds(groups, edge) + hand_over)
        return self._least[key]

    def least_share(self, groups: Groups) -> float:
        """Return what a layer adds to the bubble's sum at least."""
        return self.problem.bubble * layer_seconds(groups)

    def stage(self, place: StageGroups, row: int, layers: int) -> HeteroStage:
        """Return the stage of so many layers at a place, which recomputes where it has to."""
        edge, flying = edge_costs(self.problem, place.is_first, place.behind is None), int(self._flying[row, 0])
        keeping = HeteroStage(place.groups, layers)
        fits = held_bytes(self.problem, self.replicas, keeping, edge, flying) <= place.groups.kind.memory_bytes
        return HeteroStage(place.groups, layers, recompute=not fits)

    def _bound(self, groups: Groups, edge: EndCosts, seconds: Numbers) -> Numbers:
        ends = update_seconds(self.problem, self.replicas, groups, self._layers, edge)
        return _times(self._count - self.problem.bubble, seconds) + ends

    def _seconds(self, groups: Groups, edge: EndCosts) -> Numbers:
        """Return the seconds of a micro-batch without what is handed over; infinite where memory does not hold it."""
        if (groups, edge) not in self._work:
            self._work[groups, edge] = self._new_seconds(groups, edge)
        return self._work[groups, edge]

    def _new_seconds(self, groups: Groups, edge: EndCosts) -> Numbers:
        problem, layer = self.problem, groups.layer
        left = groups.kind.memory_bytes - state_bytes(problem, self.replicas, groups, self._layers, edge)
        keeps = activation_bytes(layer, self._layers, edge, self._flying, recompute=False) <= left
        again: Numbers | float = np.inf
        if problem.freedom.recompute and not keeps.all():
            held = activation_bytes(layer, self._layers, edge, self._flying, recompute=True)
            again = np.where(held <= left, work_seconds(groups, self._layers, edge, recompute=True), np.inf)
        result = np.where(keeps, work_seconds(groups, self._layers, edge, recompute=False), again)
        result[0], result[:, 0] = np.inf, np.inf
        return result


def _times(factor: float, seconds: Numbers) -> Numbers:
    """Return the product, infinite where seconds are, even for a factor of 0."""
    return factor * seconds if factor else np.where(np.isfinite(seconds), 0.0, np.inf)


def throughput_bound(problem: HeteroProblem, replicas: int) -> float:
    """Return seconds that no plan is below: all groups are busy with the slowest stage's share, wherever stages stand.

    A micro-batch goes through L layers on the fastest groups at best; all further ones, and what ends the step, take as
    long as all groups of a replica need together for L layers.
    """
    pairs = [
        [(kind.num_groups(degree) / replicas, Groups(kind, degree)) for degree in kind.degrees]
        for kind in problem.kinds
    ]
    rate = sum(max(count / _layer_bound(problem, replicas, one) for count, one in found) for found in pairs)
    fastest = min(layer_seconds(one) for found in pairs for _, one in found)
    return problem.num_layers * (1 / rate + problem.bubble * fastest)


def layer_seconds(groups: Groups) -> float:
    """Return forward and backward of a layer and a micro-batch, nothing of which is computed again."""
    return work_seconds(groups, 1.0, NOTHING, recompute=False)


_NO_TIME = 1e-30  # seconds


def _layer_bound(problem: HeteroProblem, replicas: int, groups: Groups) -> float:
    """Return what a layer adds at least to a stage's side of (1): all micro-batches but the bubble, and the end."""
    count = problem.num_micro_batches // replicas
    with_it, without = (update_seconds(problem, replicas, groups, layers, NOTHING) for layers in (1.0, 0.0))
    return max((count - problem.bubble) * layer_seconds(groups) + with_it - without, _NO_TIME)


_MOST_LIMITS = 512


class Bounds:
    """Lower bounds for choices of some groups, for one number of replicas."""

    def __init__(self, tables: Tables, groups: Iterable[Groups]) -> None:
        self._tables = tables
        values = np.unique(np.concatenate([tables.least_bounds(one, 0.0).ravel() for one in groups]))
        values = values[np.isfinite(values)]
        self._limits: Numbers = values[:: 1 + len(values) // _MOST_LIMITS]
        self._until = np.append(self._limits, np.inf)[1:]  # limits stand for all up to here
        self._most: dict[tuple[GroupChoice, float, EndCosts], Numbers] = {}
        self._hand_overs: dict[tuple[Groups, Groups], float] = {}

    def quick_seconds(self, chosen: Sequence[Sequence[GroupChoice]]) -> list[float]:
        """Return such seconds of many choices, which take little to work out: infinite where memory is too small.

        They leave out what is handed over, and look at few limits from the least that holds all layers.
        """
        unlike = list({id(one): one for one in chain.from_iterable(chosen)}.values())
        if not unlike or not len(self._limits):
            return [math.inf] * len(chosen)
        numbers = {id(one): number for number, one in enumerate(unlike)}
        width, nobody = max(map(len, chosen)), len(numbers)
        places = np.array([[numbers[id(one)] for one in own] + [nobody] * (width - len(own)) for own in chosen])
        most = np.stack([*(self._most_layers(one, 0.0) for one in unlike), np.zeros(len(self._limits))])
        shares = np.array([*(self._tables.least_share(one.groups) for one in unlike), 0.0])
        places = np.take_along_axis(places, np.argsort(shares[places], axis=1, kind="stable"), axis=1)
        first = _first_columns(most, places, self._tables.problem.num_layers)
        found: list[float] = np.where(
            first < len(self._limits), self._least(most, shares, places, first), np.inf
        ).tolist()
        return found

    def _least(self, most: Numbers, shares: Numbers, places: Columns, first: Columns) -> Numbers:
        """Return the least of limits, from the first on, with the sum of shares that layers have within the next."""
        least, last = np.full(len(places), np.inf), len(self._limits) - 1
        here = np.minimum(first, last)
        ends = [np.searchsorted(self._limits, factor * self._limits[here]) for factor in _FACTORS]
        for following in (*ends, np.full(len(places), last)):
            there = np.minimum(np.maximum(following, here), last)
            filled = _filled(most[places, there[:, None]], shares[places], self._tables.problem.num_layers)
            least, here = np.minimum(least, self._limits[here] + filled), there
        return least

    def seconds(self, choices: Sequence[GroupChoice]) -> float:
        """Return seconds that no arrangement of the choices is below; infinite where none fits memory."""
        if not choices:
            return math.inf
        problem, share = self._tables.problem, self._tables.least_share
        by_share = sorted(choices, key=lambda choice: share(choice.groups))
        hand_overs = [min(self._hand_over(one.groups, other.groups) for other in choices) for one in by_share]
        pairs = list(zip(by_share, hand_overs, strict=True))
        most = [self._most_layers(choice, hand_over) for choice, hand_over in pairs]
        spared = self._spared(pairs)
        added = np.maximum(spared, 0.0)  # whoever takes them
        seconds = self._limits + share(by_share[0].groups) * (added + problem.before.work + problem.after.work)
        left = problem.num_layers - added
        for choice, taken in zip(by_share, most, strict=True):
            seconds += share(choice.groups) * np.minimum(left, taken)
            left = np.maximum(left - taken, 0.0)
        fits = np.add.reduce(most) + spared >= problem.num_layers
        return float(seconds[fits].min(initial=math.inf))

    def _hand_over(self, front: Groups, behind: Groups) -> float:
        if (front, behind) not in self._hand_overs:
            self._hand_overs[front, behind] = hand_over_seconds(self._tables.problem, front, behind)
        return self._hand_overs[front, behind]

    def _spared(self, pairs: Iterable[tuple[GroupChoice, float]]) -> Numbers:
        """Return how many layers more the last stage takes within each limit: it hands nothing over, but has an end."""
        ones = ((replace(choice, most_stages=1), hand_over) for choice, hand_over in pairs)
        after = self._tables.problem.after
        more = [self._most_layers(one, 0.0, after) - self._most_layers(one, hand_over) for one, hand_over in ones]
        spared: Numbers = np.maximum.reduce(more)
        return spared

    def _most_layers(self, choice: GroupChoice, hand_over: float, edge: EndCosts = NOTHING) -> Numbers:
        """Return how many layers the stages of a choice take at most within each limit, all of which hand over."""
        key = choice, hand_over, edge
        if key not in self._most:
            rows = self._tables.least_bounds(choice.groups, hand_over, edge)[1 : choice.most_stages + 1]
            found = np.searchsorted(np.sort(rows.ravel()), self._until, side="left")
            self._most[key] = found.astype(np.float64)
        return self._most[key]


_FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)  # over the least limit: where others are looked at


def _filled(most: Numbers, shares: Numbers, count: int) -> Numbers:
    """Return the sums of so many layers, filled by rows into columns that take up to so many, for their shares each."""
    before = np.cumsum(most, axis=1) - most
    filled: Numbers = (np.clip(count - before, 0.0, most) * shares).sum(axis=1)
    return filled


def _first_columns(amounts: Numbers, places: Columns, enough: float) -> Columns:
    """Return for some rows at a time the first column in which they come to so much; the number of columns if none.

    Amounts do not fall from column to column.
    """
    count = amounts.shape[1]
    low, high = np.zeros(len(places), dtype=np.int64), np.full(len(places), count)
    for _ in range(count.bit_length()):
        middle = np.minimum((low + high) // 2, count - 1)
        is_enough = amounts[places, middle[:, None]].sum(axis=1) >= enough
        high = np.where(is_enough, np.minimum(high, middle), high)
        low = np.where(is_enough, low, np.minimum(middle + 1, high))
    return high
