"""The HeteroAuto search: which kinds of chips, in groups of which sizes, form the stages of equal pipelines.

Non-uniform pipelines, by a search on two levels. The upper level chooses the number of replicas and the size of the
tensor parallel groups of each kind, in order of a lower bound; the lower level (`sweep.arrange`), exact, which kinds
are used and in which order, how many stages they have, and the layers and recomputation of each stage. So the best plan
in which every kind has groups of one size is found and proved. A second stage then splits kinds: of one kind, some
groups may be larger than others; from the best plan on, as long as a split makes it faster (local, hence without
proof). H2: arXiv 2505.17548, section on HeteroAuto; its planner is not public.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_cost import Bounds, GroupChoice, Groups, HeteroResult, Tables
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, HeteroProblem
from hetu_fx.planner.search.heteroauto.layer_sweep import PipelineArrangement, arrange

NEAR = 1.05
"""What is slower than the best by less than this factor may be faster by prices that know more."""

MOST_NEAR = 4
"""Of the choices of groups, so many are looked at for plans that are nearly as fast."""

_SLACKS = (1.05, 1.3, 2.0, math.inf)  # over the least lower bound, until something is found


def search(problem: HeteroProblem) -> HeteroResult:
    """Return the best plan found. Raises `PlanError` when none fits memory, with a hint."""
    result = OuterLevel(problem).search_below(math.inf)
    if result is None:
        raise PlanError(_nothing_fits(problem))
    return result


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What the upper level chooses, and what is no faster than it can get."""

    seconds: float
    replicas: int
    choices: tuple[GroupChoice, ...]


_Best = tuple[_Candidate, PipelineArrangement]
"""A candidate, and its best arrangement."""


class _Lazily:
    """Candidates that may fit, in order of bounds, each of which is worked out when a quick one no longer tells."""

    def __init__(self, quick: Iterable[_Candidate], bounded: Callable[[_Candidate], _Candidate]) -> None:
        """`bounded` returns a candidate with a bound that is no less."""
        self._heap = [(one.seconds, False, number, one) for number, one in enumerate(quick)]
        heapq.heapify(self._heap)
        self._bounded, self._found = bounded, list[_Candidate]()

    def __iter__(self) -> Iterator[_Candidate]:
        for place in itertools.count():
            while place == len(self._found) and self._heap:
                self._work_out()
            if place == len(self._found):
                return
            yield self._found[place]

    def next_bound(self) -> tuple[float, bool]:
        """Work out one bound more; return the least of all, and whether it is one that was worked out."""
        if self._heap and not self._heap[0][1]:
            self._work_out()
        return self._heap[0][:2] if self._heap else (math.inf, True)

    def _work_out(self) -> None:
        _, is_bounded, number, one = heapq.heappop(self._heap)
        if is_bounded:
            self._found.append(one)
        elif (bound := self._bounded(one)).seconds < math.inf:
            heapq.heappush(self._heap, (bound.seconds, True, number, bound))


class OuterLevel:
    """The upper level; remembers tables and bounds of each number of replicas."""

    def __init__(self, problem: HeteroProblem) -> None:
        self._problem = problem
        most = {count: sum(kind.num_groups(1) for kind in problem.kinds) // count for count in problem.replicas}
        self._tables = {n: Tables(problem, n, min(problem.num_layers, stages)) for n, stages in most.items() if stages}
        groups = [Groups(kind, degree) for kind in problem.kinds for degree in kind.degrees]
        self._bounds = {count: Bounds(tables, groups) for count, tables in self._tables.items()}
        self._candidates = _Lazily(self._all(), self._bounded)
        self._known: dict[_Candidate, tuple[float, PipelineArrangement | None]] = {}
        self._num_arranged = 0

    def next_bound(self) -> tuple[float, bool]:
        """Work out one bound more; return what no plan with groups of one size per kind is below, and if that is all.

        It is infinite where none can fit memory.
        """
        return self._candidates.next_bound()

    def search_below(self, seconds: float) -> HeteroResult | None:
        """Return the best plan found; None when none that fits memory takes less than so many seconds."""
        best = self._coarse(seconds)
        if best is None:
            return None
        found = self._refined(best) if self._problem.freedom.split_kinds else best
        return self._result(*found, coarse_seconds=best[1].seconds)

    def near_below(self, seconds: float) -> list[HeteroResult]:
        """Return the best plan of less than so many seconds, and those of other groups that are nearly as fast."""
        best = self.search_below(seconds)
        if best is None:
            return []
        limit = min(seconds, best.seconds * NEAR)
        few = (candidate for candidate in islice(self._candidates, MOST_NEAR) if candidate.seconds < limit)
        pairs = ((one, self._arranged(one, limit)) for one in few)
        others = [self._result(one, arranged, arranged.seconds) for one, arranged in pairs if arranged is not None]
        return [best, *(one for one in others if one.stages != best.stages)]

    def _arranged(self, candidate: _Candidate, below: float) -> PipelineArrangement | None:
        """Return its fastest arrangement of less than `below` seconds, as far as it is known already."""
        limit, found = self._known.get(candidate, (0.0, None))
        if found is None and limit < below:
            self._num_arranged += 1
            found = arrange(self._tables[candidate.replicas], candidate.choices, below)
            self._known[candidate] = below, found
        return found if found is not None and found.seconds < below else None

    def _result(self, chosen: _Candidate, arranged: PipelineArrangement, coarse_seconds: float) -> HeteroResult:
        return HeteroResult(chosen.replicas, arranged.stages, arranged.seconds, coarse_seconds, self._num_arranged)

    def _coarse(self, below: float) -> _Best | None:
        """Return the best plan of less than `below` seconds in which every kind has groups of one size.

        That of the least bound is arranged first, within limits that rise until it can be; it limits all others.
        """
        first, best = list(islice(self._candidates, 1)), None
        for slack in _SLACKS if first else ():
            limit = min(below, first[0].seconds * slack)
            best = self._best(first, limit)
            if best is not None or limit == below:
                break
        others, limit = islice(self._candidates, 1, None), below if best is None else best[1].seconds
        return self._best(others, limit, MOST_NEAR - 1) or best

    def _refined(self, best: _Best) -> _Best:
        """Return the best plan that splitting kinds, one after the other, leads to."""
        while True:
            splits = [self._candidate(best[0].replicas, choices) for choices in self._splits(best[0])]
            found = self._best(sorted(splits, key=lambda split: split.seconds), best[1].seconds)
            if found is None:
                return best
            best = found

    def _best(self, candidates: Iterable[_Candidate], below: float, num_near: int = 0) -> _Best | None:
        """Return the best of candidates, in order of their bounds, that takes less than `below` seconds.

        Of the first ones, so many, plans that are nearly as fast are worked out on the way.
        """
        best: _Best | None = None
        for number, candidate in enumerate(candidates):
            if candidate.seconds >= below:
                break
            arranged = self._arranged(candidate, below * NEAR if number < num_near else below)
            if arranged is not None and arranged.seconds < below:
                below, best = arranged.seconds, (candidate, arranged)
        return best

    def _candidate(self, replicas: int, choices: tuple[GroupChoice, ...]) -> _Candidate:
        return _Candidate(self._bounds[replicas].seconds(choices), replicas, choices)

    def _bounded(self, quick: _Candidate) -> _Candidate:
        """Return a candidate with the greater of both its bounds."""
        exact = self._candidate(quick.replicas, quick.choices)
        return exact if exact.seconds > quick.seconds else quick

    def _all(self) -> Iterator[_Candidate]:
        """Yield what can be chosen with groups of one size per kind, with quick bounds."""
        for replicas, bounds in self._bounds.items():
            chosen = list(self._chosen(replicas))
            pairs = zip(bounds.quick_seconds(chosen), chosen, strict=True)
            yield from (_Candidate(seconds, replicas, choices) for seconds, choices in pairs if seconds < math.inf)

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
        f"no pipeline of {problem.num_layers} layers fits {kinds} with {list(problem.replicas)} replicas\n"
        f"hint: give more chips, larger groups, or more micro-batches (so that each keeps less), or allow recomputation"
    )
