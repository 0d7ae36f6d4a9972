"""Plan for unlike kinds of chips as H2's HeteroAuto does: non-uniform pipelines, by a search on two levels.

The upper level chooses the number of replicas and the size of the tensor parallel groups of each kind, in order of a
lower bound (`bounds`); the lower level, exact, which kinds are used and in which order, how many stages they have,
and the layers and recomputation of each stage (`_arrange`). So the best plan in which every kind has groups of one size
is found and proved. A second stage then splits kinds: of one kind, some groups may be larger than others; from the best
plan on, as long as a split makes it faster (local, hence without proof). H2: arXiv 2505.17548, section on HeteroAuto;
its planner is not public.

Lower bounds of the upper level: what no arrangement of given groups is faster than.

Left out are the order of the groups, what is handed over, and what stands before and after the layers; the j-th stage
of some groups is at least the j-th from the end. Then for a limit B on the maximum of (1) in `cost` each stage takes so
many layers at most, all of them together have to take all, and the sum is least where the layers that add least to it
are filled first. So the bound is min_B B + sum(B), over all B that some stage can have.

The lower level, exact: which of given groups follow which, in how many stages, of how many layers each.

Minimise (1) of `cost`, which is sum_j share_j + max_k bound_k. `sweep` finds the least sum F(B) for a limit B on the
maximum. F falls as B grows; so B starts where nothing above can be better, and falls to just below the maximum of what
was found, or to where F alone is too much, until nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.cost import Groups, HeteroStage, Numbers
from hetu_fx.planner.search.heteroauto.problem import ChipKind, HeteroProblem
from hetu_fx.planner.search.heteroauto.result import HeteroResult
from hetu_fx.planner.search.heteroauto.sweep import GroupChoice, Sweep, SweepStep
from hetu_fx.planner.search.heteroauto.tables import Tables

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
    coarse = best.arranged.seconds
    best = upper.refined(best) if problem.freedom.split_kinds else best
    return HeteroResult(best.replicas, best.arranged.stages, best.arranged.seconds, coarse, upper.num_arranged)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What the upper level chooses, and what is no faster than it can get."""

    seconds: float
    replicas: int
    choices: tuple[GroupChoice, ...]


@dataclass(frozen=True, slots=True)
class _BestArrangement:
    """A candidate's best arrangement."""

    replicas: int
    choices: tuple[GroupChoice, ...]
    arranged: Arranged


class _Upper:
    """The upper level; remembers tables and bounds of each number of replicas."""

    def __init__(self, problem: HeteroProblem) -> None:
        self._problem = problem
        most = {count: sum(kind.num_groups(1) for kind in problem.kinds) // count for count in problem.replicas}
        self._tables = {n: Tables(problem, n, min(problem.num_layers, stages)) for n, stages in most.items() if stages}
        groups = [Groups(kind, degree) for kind in problem.kinds for degree in kind.degrees]
        self._bounds = {count: Bounds(tables, groups) for count, tables in self._tables.items()}
        self.num_arranged = 0

    def coarse(self, below: float) -> _BestArrangement | None:
        """Return the best plan of less than `below` seconds in which every kind has groups of one size."""
        candidates = sorted(self._candidates(), key=lambda candidate: candidate.seconds)
        for slack in _SLACKS if candidates else ():
            limit = min(below, candidates[0].seconds * slack)
            found = self._best(candidates, limit)
            if found is not None or limit == below:
                return found
        return None

    def refined(self, best: _BestArrangement) -> _BestArrangement:
        """Return the best plan that splitting kinds, one after the other, leads to."""
        while True:
            splits = [self._candidate(best.replicas, choices) for choices in self._splits(best)]
            found = self._best(sorted(splits, key=lambda split: split.seconds), best.arranged.seconds)
            if found is None:
                return best
            best = found

    def _best(self, candidates: Sequence[_Candidate], below: float) -> _BestArrangement | None:
        """Return the best of candidates, in order of their bounds, that takes less than `below` seconds."""
        best: _BestArrangement | None = None
        for candidate in candidates:
            if candidate.seconds >= below:
                break
            self.num_arranged += 1
            arranged = _arrange(self._tables[candidate.replicas], candidate.choices, below)
            if arranged is not None:
                below, best = arranged.seconds, _BestArrangement(candidate.replicas, candidate.choices, arranged)
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

    def _splits(self, best: _BestArrangement) -> Iterator[tuple[GroupChoice, ...]]:
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


class Bounds:
    """Lower bounds for choices of some groups, for one number of replicas."""

    def __init__(self, tables: Tables, groups: Iterable[Groups]) -> None:
        self._tables = tables
        self._bounds = {one: tables.least_bounds(one) for one in groups}
        values = np.unique(np.concatenate([bounds.ravel() for bounds in self._bounds.values()]))
        self._limits: Numbers = values[np.isfinite(values)]
        self._most: dict[GroupChoice, Numbers] = {}

    def seconds(self, choices: Sequence[GroupChoice]) -> float:
        """Return seconds that no arrangement of the choices is below; infinite where none fits memory."""
        left = np.full(len(self._limits), float(self._tables.problem.num_layers))
        seconds = self._limits.copy()
        for choice in sorted(choices, key=lambda choice: self._tables.least_share(choice.groups)):
            taken = np.minimum(left, self._most_layers(choice))
            seconds += self._tables.least_share(choice.groups) * taken
            left -= taken
        return float(seconds[left == 0].min(initial=math.inf))

    def _most_layers(self, choice: GroupChoice) -> Numbers:
        """Return how many layers the stages of a choice take at most within each limit."""
        if choice not in self._most:
            bounds = np.sort(self._bounds[choice.groups][1 : choice.most_stages + 1].ravel())
            self._most[choice] = np.searchsorted(bounds, self._limits, side="right").astype(np.float64)
        return self._most[choice]


@dataclass(frozen=True, slots=True)
class Arranged:
    """The stages of a pipeline, in order, and the seconds of a step."""

    seconds: float
    stages: tuple[HeteroStage, ...]


def _arrange(tables: Tables, choices: Sequence[GroupChoice], below: float) -> Arranged | None:
    """Return the fastest arrangement of less than `below` seconds, None when there is none."""
    best: Arranged | None = None
    for sizes in _sizes(tables):
        best = _descend(tables, choices, below if best is None else best.seconds, sizes) or best
    return best


def _sizes(tables: Tables) -> Iterator[list[int]]:
    """Yield the numbers of layers that stages of one pipeline may have."""
    count = tables.problem.num_layers
    if tables.problem.freedom.uneven_layers:
        yield list(range(1, count + 1))
    else:
        least = {count // stages for stages in range(1, count + 1)}
        yield from ([n for n in (size, size + 1) if n <= count] for size in sorted(least))


def _descend(tables: Tables, choices: Sequence[GroupChoice], below: float, sizes: list[int]) -> Arranged | None:
    best: Arranged | None = None
    limit = below - tables.problem.num_layers * min(tables.least_share(choice.groups) for choice in choices)
    while _may_hold(tables, choices, limit, sizes):
        found = Sweep(tables, choices, math.nextafter(limit, -math.inf), sizes).solve()
        if found is None:
            break
        share, steps = found
        largest = max(_bound(tables, step) for step in steps)
        if share + largest < below:
            below = share + largest
            best = Arranged(below, tuple(tables.stage(s.place, s.row, s.layers) for s in steps))
        limit = min(below - share, largest)
    return best


def _may_hold(tables: Tables, choices: Sequence[GroupChoice], limit: float, sizes: list[int]) -> bool:
    """Tell whether all stages together could hold all layers within the limit, wherever they stand."""
    held = 0
    for choice in choices:
        fits = tables.least_bounds(choice.groups)[1 : choice.most_stages + 1, sizes] <= limit
        held += int((fits * sizes).max(axis=1, initial=0).sum())
    return held >= tables.problem.num_layers


def _bound(tables: Tables, step: SweepStep) -> float:
    return float(tables.costs(step.place).bound[step.row, step.layers])
