"""The HeteroAuto search, as the table of searches knows it: plans for unlike kinds of chips as H2's HeteroAuto does.

Non-uniform pipelines, by a search on two levels. The upper level chooses the number of replicas and the size of the
tensor parallel groups of each kind, in order of a lower bound; the lower level (`sweep.arrange`), exact, which kinds
are used and in which order, how many stages they have, and the layers and recomputation of each stage. So the best plan
in which every kind has groups of one size is found and proved. A second stage then splits kinds: of one kind, some
groups may be larger than others; from the best plan on, as long as a split makes it faster (local, hence without
proof). H2: arXiv 2505.17548, section on HeteroAuto; its planner is not public.

HeteroAuto plans for micro-batches of one size; here several numbers of replicas and micro-batches are tried, and the
cost model that all searches share says which plan is best. HeteroAuto recomputes all layers of a stage or none; what is
planned is the least of them that fits memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.contiguous import replica_counts
from hetu_fx.planner.search.device_orders import EXHAUSTIVE_DEVICES, alike_in, ranks_by_node
from hetu_fx.planner.search.heteroauto.cost import Bounds, GroupChoice, Groups, HeteroResult, HeteroStage, Tables
from hetu_fx.planner.search.heteroauto.problem import ChipKind, HeteroProblem, hetero_problem
from hetu_fx.planner.search.heteroauto.sweep import Arranged, arrange
from hetu_fx.planner.search.homogeneous import candidates
from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.planner.search.regions import MOST_CLASSES
from hetu_fx.plans.plan import Pipeline, Plan, Stage

MARGINS = (1.0, 0.85, 0.7)
"""Parts of the memory to plan for, one after the other until a plan fits: passing buffers are not in HeteroAuto's."""

MANY_DEVICES = 64
"""In larger clusters, a shape takes seconds to search: `MOST_WORK` is the shapes times the devices that are."""

MOST_WORK = 1024

_WORTH = 1.25  # what HeteroAuto's own prices say is slower than the best so far by this factor is not tried

_SLACKS = (1.05, 1.3, 2.0, math.inf)  # over the least lower bound, until something is found


def search(problem: HeteroProblem) -> HeteroResult:
    """Return the best plan found. Raises `PlanError` when none fits memory, with the way out."""
    result = search_below(problem, math.inf)
    if result is None:
        raise PlanError(_nothing_fits(problem))
    return result


def search_below(problem: HeteroProblem, seconds: float) -> HeteroResult | None:
    """Return the best plan found; None when none that fits memory takes less than so many seconds."""
    upper = _Upper(problem)
    best = upper.coarse(seconds)
    if best is None:
        return None
    chosen, arranged = upper.refined(best) if problem.freedom.split_kinds else best
    return HeteroResult(chosen.replicas, arranged.stages, arranged.seconds, best[1].seconds, upper.num_arranged)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What the upper level chooses, and what is no faster than it can get."""

    seconds: float
    replicas: int
    choices: tuple[GroupChoice, ...]


_Best = tuple[_Candidate, Arranged]
"""A candidate, and its best arrangement."""


class _Upper:
    """The upper level; remembers tables and bounds of each number of replicas."""

    def __init__(self, problem: HeteroProblem) -> None:
        self._problem = problem
        most = {count: sum(kind.num_groups(1) for kind in problem.kinds) // count for count in problem.replicas}
        self._tables = {n: Tables(problem, n, min(problem.num_layers, stages)) for n, stages in most.items() if stages}
        groups = [Groups(kind, degree) for kind in problem.kinds for degree in kind.degrees]
        self._bounds = {count: Bounds(tables, groups) for count, tables in self._tables.items()}
        self.num_arranged = 0

    def coarse(self, below: float) -> _Best | None:
        """Return the best plan of less than `below` seconds in which every kind has groups of one size."""
        candidates = sorted(self._candidates(), key=lambda candidate: candidate.seconds)
        for slack in _SLACKS if candidates else ():
            limit = min(below, candidates[0].seconds * slack)
            found = self._best(candidates, limit)
            if found is not None or limit == below:
                return found
        return None

    def refined(self, best: _Best) -> _Best:
        """Return the best plan that splitting kinds, one after the other, leads to."""
        while True:
            splits = [self._candidate(best[0].replicas, choices) for choices in self._splits(best[0])]
            found = self._best(sorted(splits, key=lambda split: split.seconds), best[1].seconds)
            if found is None:
                return best
            best = found

    def _best(self, candidates: Sequence[_Candidate], below: float) -> _Best | None:
        """Return the best of candidates, in order of their bounds, that takes less than `below` seconds."""
        best: _Best | None = None
        for candidate in candidates:
            if candidate.seconds >= below:
                break
            self.num_arranged += 1
            arranged = arrange(self._tables[candidate.replicas], candidate.choices, below)
            if arranged is not None:
                below, best = arranged.seconds, (candidate, arranged)
        return best

    def _candidate(self, replicas: int, choices: tuple[GroupChoice, ...]) -> _Candidate:
        return _Candidate(self._bounds[replicas].seconds(choices), replicas, choices)

    def _candidates(self) -> Iterator[_Candidate]:
        """Yield what can be chosen with groups of one size per kind, as far as it may fit."""
        for replicas in self._tables:
            for choices in self._chosen(replicas):
                candidate = self._candidate(replicas, choices)
                if candidate.seconds < math.inf:
                    yield candidate

    def _chosen(self, replicas: int) -> Iterator[tuple[GroupChoice, ...]]:
        able = [some for kind in self._problem.kinds if (some := _choices(kind, replicas))]
        if self._problem.freedom.degree_per_kind:
            yield from product(*able)
        else:
            degrees = sorted({choice.groups.degree for some in able for choice in some})
            yield from (tuple(c for some in able for c in some if c.groups.degree == degree) for degree in degrees)

    def _splits(self, best: _Candidate) -> Iterator[tuple[GroupChoice, ...]]:
        """Yield the choices with one kind more that has groups of two sizes."""
        kinds = [choice.groups.kind for choice in best.choices]
        for index, choice in enumerate(best.choices):
            others = (*best.choices[:index], *best.choices[index + 1 :])
            if kinds.count(choice.groups.kind) == 1:
                for degree in choice.groups.kind.degrees:
                    if degree != choice.groups.degree:
                        yield from ((*others, *p) for p in _pairs(choice.groups, degree, best.replicas))


def _choices(kind: ChipKind, replicas: int) -> list[GroupChoice]:
    """Return the sizes of groups of which there is one for each replica."""
    counts = ((degree, kind.num_groups(degree) // replicas) for degree in kind.degrees)
    return [GroupChoice(Groups(kind, degree), count) for degree, count in counts if count]


def _pairs(groups: Groups, other: int, replicas: int) -> Iterator[tuple[GroupChoice, GroupChoice]]:
    """Yield the ways to have groups of two sizes on one kind; powers of two leave no gaps in a node."""
    kind, (small, large) = groups.kind, sorted((groups.degree, other))
    for count in range(1, kind.num_groups(large) // replicas + 1):
        left = (kind.num_groups(small) - count * replicas * (large // small)) // replicas
        if left:
            yield GroupChoice(Groups(kind, small), left), GroupChoice(Groups(kind, large), count)


def _nothing_fits(problem: HeteroProblem) -> str:
    kinds = ", ".join(f"{kind.chips} x {kind.name} of {kind.memory_bytes / 1e6:.4g} MB" for kind in problem.kinds)
    return (
        f"no pipeline of {problem.num_layers} layers fits {kinds} with {list(problem.replicas)} replicas: give more "
        f"chips, larger groups, more micro-batches (so that each keeps less), or allow recomputation"
    )


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
    for by_replica in (False, True):
        placed = _placed(problem.cluster, result, by_replica)
        pipelines = tuple(
            Pipeline(
                tuple(_stage(placed[i, number], stage) for i, stage in enumerate(result.stages)),
                micro_batches=micro_batches,
            )
            for number in range(result.replicas)
        )
        yield problem.plan(pipelines)


def _stage(devices: tuple[int, ...], stage: HeteroStage) -> Stage:
    return Stage(devices, blocks=stage.layers, recompute=stage.layers if stage.recompute else 0)


def _placed(cluster: Cluster, result: HeteroResult, by_replica: bool) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the devices of each (stage, replica), larger groups first so that they leave no gaps in a node."""
    free = {alike.name: list(ranks_by_node(alike.devices).values()) for alike in alike_in(cluster)}
    places = list(product(range(len(result.stages)), range(result.replicas)))
    degree = {place: result.stages[place[0]].groups.degree for place in places}
    order = sorted(places, key=lambda place: (-degree[place], *(place[::-1] if by_replica else place)))
    return {place: _taken(free[result.stages[place[0]].groups.kind.name], degree[place]) for place in order}


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
        if problem.time_limit.ends(found):
            break
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
