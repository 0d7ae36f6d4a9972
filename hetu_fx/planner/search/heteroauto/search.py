"""The HeteroAuto search: which kinds of chips, in groups of which sizes, form the stages of equal pipelines.

Non-uniform pipelines, by a search on two levels. The upper level chooses the number of replicas and the size of the
tensor parallel groups of each kind, in order of a lower bound; the lower level (`sweep.arrange`), exact, which kinds
are used and in which order, how many stages they have, and the layers and recomputation of each stage. So the best plan
in which every kind has groups of one size is found and proved. A second stage then splits kinds: of one kind, some
groups may be larger than others; from the best plan on, as long as a split makes it faster (local, hence without
proof). H2: arXiv 2505.17548, section on HeteroAuto; its planner is not public.

Which of given groups follow which, in how many stages, of how many layers each: the lower level, exact. Minimise (1) of
`cost`, which is sum_j share_j + max_k bound_k, with bubble s and (m - bubble) s + u of a stage as its share and its
bound. F(B) is the least sum over pipelines whose maximum is within a limit B. It falls as B grows; so B starts where
nothing above can be better, and falls to just below the maximum of what was found, or to where F alone is too much,
until nothing is left. F(B) is found by dynamic programming from the pipeline's end:

    F(K, k, q, x) = min over l <= x and k' of F(K', k', q - 1, x - l) + share_k(q, l)  with bound_k(q, l) <= B  (1)

over sets K of choices that are used up to now, the foremost k of which holds the stage in row q, and x layers; k' is k
itself while it has groups left for a stage, or one of K without k. All rows and layers of (1) are worked out at once.
Which stages make the least sum is found by working out again what led to it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, islice, product

import numpy as np

from hetu_fx.errors import PlanError
from hetu_fx.planner.search.heteroauto.chip_cost import (
    Bounds,
    GroupChoice,
    Groups,
    HeteroResult,
    HeteroStage,
    Numbers,
    StageGroups,
    Tables,
)
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, HeteroProblem

Used = frozenset[int]
"""Which choices stand in the end of a pipeline."""


@dataclass(frozen=True, slots=True)
class SweepStep:
    """A stage that was added in front: its place, row and layers."""

    place: StageGroups
    row: int
    layers: int


@dataclass(frozen=True, slots=True)
class _Closing:
    """A first stage, and what it was put in front of: `before` of its own choice, if any, and the used ones."""

    share: float
    step: SweepStep
    used: Used
    front: int
    before: int


@dataclass(frozen=True, slots=True)
class _Sums:
    """The least sums of pipelines' ends, by rows and layers: infinite but for some of the rows [low, high).

    Left of 0 layers stand as many infinite columns as there are layers, so that shifted rows are views.
    """

    values: Numbers
    low: int
    high: int

    @property
    def by_layers(self) -> Numbers:
        """Return the sums of all rows by layers."""
        return self.values[:, self.values.shape[1] // 2 :]

    def behind_each(self, most: int) -> Numbers:
        """Return, by rows, layers x and layers l of a stage more, 1 to `most`, the ends with x - l layers."""
        width = self.values.shape[1]
        count, (row, column) = width // 2, self.values.strides
        start = self.low * row + (count - 1) * column
        shape = (self.high - self.low, count + 1, most)
        return np.ndarray(shape, np.float64, self.values, start, (row, column, -column))

    def least(self, other: _Sums) -> _Sums:
        """Return the lesser sums of both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return _Sums(np.minimum(self.values, other.values), low, high)


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares of stages at a place by rows and layers, and after which layers all of a row are infinite."""

    values: Numbers
    most: tuple[int, ...]

    @classmethod
    def of(cls, values: Numbers) -> _Shares:
        most = (np.isfinite(values) * np.arange(values.shape[1])).max(axis=1)
        return cls(values, tuple(np.maximum.accumulate(most[::-1])[::-1].tolist()))  # nor are later rows'


class Sweep:
    """(1) for one limit; `sizes` are the numbers of layers that a stage may have."""

    def __init__(
        self,
        tables: Tables,
        choices: Sequence[GroupChoice],
        limit: float,
        sizes: Sequence[int],
        below: float = math.inf,
    ) -> None:
        """Sums that are not below so much are not looked for."""
        self._tables, self._choices, self._limit, self._below = tables, choices, limit, below
        self._num_layers = tables.problem.num_layers
        self._most = min(self._num_layers, sum(choice.most_stages for choice in choices))
        allowed = {0, *sizes}  # of 0 layers there are no stages in any case
        self._forbidden = [size for size in range(self._num_layers + 1) if size not in allowed]
        self._blank: Numbers = np.full((self._most + 1, 2 * self._num_layers + 1), np.inf)
        self._nothing = _Sums(self._blank, 0, 0)
        nothing = self._empty(0, 1)
        nothing.values[0, self._num_layers] = 0.0
        self._ends: dict[tuple[Used, int | None], _Sums] = {(frozenset(), None): nothing}
        self._shares: dict[tuple[int, int | None, bool], _Shares] = {}

    def solve(self) -> tuple[float, tuple[SweepStep, ...]] | None:
        """Return the least sum and its stages, first one first; None when no pipeline is within the limit."""
        best: _Closing | None = None
        indices = range(len(self._choices))
        for used in (frozenset(some) for size in indices for some in combinations(indices, size)):
            for front in (index for index in indices if index not in used):
                for closing in self._close(used, front):
                    if closing.share < self._below:
                        best, self._below = closing, closing.share
        self._below = math.inf
        return None if best is None else (best.share, (best.step, *self._traced(best)))

    def _close(self, used: Used, front: int) -> Iterator[_Closing]:
        """Put all stages of a choice in front of what is used; yield the pipelines of which one is the first."""
        for end, behind in self._behind(used):
            yield from self._first_stage(end, behind, used, front, 0)
        total = self._nothing
        for count, end in enumerate(self._segment(used, front), 1):
            total = total.least(end) if count > 1 else end
            if count < self._choices[front].most_stages:
                yield from self._first_stage(end, front, used, front, count)
        self._ends[used | {front}, front] = total

    def _behind(self, used: Used) -> Iterator[tuple[_Sums, int | None]]:
        """Yield the ends that consist of what is used, and what is foremost in them."""
        if not used:
            yield self._ends[used, None], None
        for index in sorted(used):
            yield self._ends[used, index], index

    def _segment(self, used: Used, front: int) -> Iterator[_Sums]:
        """Yield F with 1, 2, ... stages of a choice in front of what is used, as long as there is any."""
        parts = [self._extended(end, front, behind) for end, behind in self._behind(used)]
        found = [part for part in parts if part.low < part.high]
        if not found:
            return
        result = reduce(_Sums.least, found)
        yield result
        for _ in range(1, self._choices[front].most_stages):
            result = self._extended(result, front, front)
            if result.low == result.high:
                return
            yield result

    def _extended(self, end: _Sums, front: int, behind: int | None) -> _Sums:
        """Return (1) with a stage in front of every end; of no rows where there is none."""
        shares, low, high = self._share(front, behind), end.low, min(end.high, self._most)
        most = shares.most[low + 1] if low < high else 0
        if not most:
            return self._nothing
        ends = _Sums(end.values, low, high).behind_each(most)
        least = (ends + shares.values[low + 1 : high + 1, None, 1 : most + 1]).min(axis=2)
        if not least.min() < self._below:
            return self._nothing
        result = self._empty(low + 1, high + 1)
        result.by_layers[low + 1 : high + 1] = least
        return result

    def _first_stage(self, end: _Sums, behind: int | None, used: Used, front: int, before: int) -> Iterator[_Closing]:
        """Yield the best pipeline that a first stage makes of an end, if there is one."""
        low, high = end.low, min(end.high, self._most)
        if low >= high:
            return
        sums = end.by_layers[low:high, ::-1] + self._share(front, behind, is_first=True).values[low + 1 : high + 1]
        row, layers = divmod(int(sums.argmin()), self._num_layers + 1)
        if sums[row, layers] < math.inf:
            step = SweepStep(self._place(front, behind, is_first=True), low + row + 1, layers)
            yield _Closing(float(sums[row, layers]), step, used, front, before)

    def _traced(self, closing: _Closing) -> Iterator[SweepStep]:
        """Yield the stages behind the first."""
        used, front, count = closing.used, closing.front, closing.before
        row, left = closing.step.row - 1, self._num_layers - closing.step.layers
        behind = closing.step.place.behind
        while row:
            if not count:
                front = next(index for index in used if self._choices[index].groups == behind)
                used = used - {front}
            segment = list(self._segment(used, front))
            count = count or self._stages_of(segment, self._ends[used | {front}, front], row, left)
            while count:
                value = float(segment[count - 1].by_layers[row, left])
                step = self._step_to(value, segment[: count - 1], used, front, row, left)
                yield step
                behind, row, left, count = step.place.behind, row - 1, left - step.layers, count - 1

    def _stages_of(self, segment: Sequence[_Sums], end: _Sums, row: int, layers: int) -> int:
        value = end.by_layers[row, layers]
        return next(count for count, part in enumerate(segment, 1) if part.by_layers[row, layers] == value)

    def _step_to(
        self, value: float, shorter: Sequence[_Sums], used: Used, front: int, row: int, layers: int
    ) -> SweepStep:
        """Return the foremost stage of an end with so many layers whose sum is `value`."""
        for end, behind in [(shorter[-1], front)] if shorter else self._behind(used):
            sums = end.by_layers[row - 1, layers::-1] + self._share(front, behind).values[row, : layers + 1]
            found = np.flatnonzero(sums == value)
            if found.size:
                return SweepStep(self._place(front, behind), row, int(found[0]))
        raise AssertionError("what was put together was put together from something")

    def _share(self, front: int, behind: int | None, *, is_first: bool = False) -> _Shares:
        """Return the shares of stages at a place, of choices by number; infinite for those that are not allowed."""
        key = front, behind, is_first
        if key not in self._shares:
            share = self._tables.costs(self._place(front, behind, is_first=is_first)).within(self._limit)
            if self._forbidden:
                share[:, self._forbidden] = np.inf
            self._shares[key] = _Shares.of(share[: self._most + 1])
        return self._shares[key]

    def _place(self, front: int, behind: int | None, *, is_first: bool = False) -> StageGroups:
        groups = None if behind is None else self._choices[behind].groups
        return StageGroups(self._choices[front].groups, groups, is_first)

    def _empty(self, low: int, high: int) -> _Sums:
        return _Sums(self._blank.copy(), low, high)


@dataclass(frozen=True, slots=True)
class PipelineArrangement:
    """The stages of a pipeline, in order, and the seconds of a step."""

    seconds: float
    stages: tuple[HeteroStage, ...]


def _arrange(tables: Tables, choices: Sequence[GroupChoice], below: float) -> PipelineArrangement | None:
    """Return the fastest arrangement of less than `below` seconds, None when there is none."""
    best: PipelineArrangement | None = None
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


def _descend(
    tables: Tables, choices: Sequence[GroupChoice], below: float, sizes: list[int]
) -> PipelineArrangement | None:
    best: PipelineArrangement | None = None
    limit = below - tables.problem.num_layers * min(tables.least_share(choice.groups) for choice in choices)
    while _may_hold(tables, choices, limit, sizes):
        found = Sweep(tables, choices, math.nextafter(limit, -math.inf), sizes, below).solve()
        if found is None:
            break
        share, steps = found
        largest = max(float(tables.costs(step.place).bound[step.row, step.layers]) for step in steps)
        if share + largest < below:
            below = share + largest
            best = PipelineArrangement(below, tuple(tables.stage(s.place, s.row, s.layers) for s in steps))
        limit = min(below - share, largest)
    return best


def _may_hold(tables: Tables, choices: Sequence[GroupChoice], limit: float, sizes: list[int]) -> bool:
    """Tell whether all stages together could hold all layers within the limit, wherever they stand."""
    held = 0
    for choice in choices:
        fits = tables.least_bounds(choice.groups, 0.0)[1 : choice.most_stages + 1, sizes] <= limit
        held += int((fits * sizes).max(axis=1, initial=0).sum())
    return held >= tables.problem.num_layers


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
            found = _arrange(self._tables[candidate.replicas], candidate.choices, below)
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
