"""Which pipeline of a strategy gets which sequence: the first of the two stages of Hydraulis' data assignment.

The sequences go to pipelines that can hold them, so that the last pipeline is done early by (4) of the cost
model. As in Hydraulis' planner, seeded shuffles are placed greedily. Left is that planner where it gives up a
strategy with a pipeline that gets nothing (here that pipeline idles) and where it ends with the shuffles:
longest-first competes with them, and the best is improved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.lower_bounds import dispatch_bound
from hetu_fx.planner.dispatch.makespan import Assigning, Effort, assign
from hetu_fx.planner.dispatch.strategy import Scheme, SequenceBatch, Strategy, check_each_once, check_holds

RESTARTS = 50
"""How many shuffles Hydraulis' planner places."""

_RENEWED_ITEMS = 500  # so many sequences are dispatched anew at most


@dataclass(frozen=True)
class Dispatch:
    """The positions in the batch of the sequences of each pipeline, every sequence exactly once.

    No dispatch of the batch to the strategy gets below `bound_seconds`.
    """

    strategy: Strategy
    batch: SequenceBatch
    pipelines: tuple[tuple[int, ...], ...]
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.pipelines) != len(self.strategy.pipelines):
            counts = f"{len(self.pipelines)} groups of sequences for the {len(self.strategy.pipelines)} pipelines"
            raise PlanError(f"a dispatch has {counts} of {self.strategy}; give one each, empty where one idles")
        check_each_once("a dispatch", self.pipelines, len(self.batch.lengths))
        for scheme, group in zip(self.strategy.pipelines, self.pipelines, strict=True):
            _check_lengths(scheme, {position: self.batch.lengths[position] for position in group})

    @cached_property
    def pipeline_seconds(self) -> tuple[float, ...]:
        """Return (4) of the cost model for each pipeline."""
        pairs = zip(self.strategy.pipelines, self.pipelines, strict=True)
        return tuple(unpacked_seconds(scheme, [self.batch.lengths[i] for i in group]) for scheme, group in pairs)

    @property
    def seconds(self) -> float:
        """Return when the last pipeline is done, its sequences yet to be packed."""
        return max(self.pipeline_seconds)


def unpacked_seconds(scheme: Scheme, lengths: Sequence[int]) -> float:
    """Return (4) of the cost model: what a pipeline needs for these sequences however they are packed."""
    return scheme.done([scheme.times.seconds(length) for length in lengths])


def dispatch(strategy: Strategy, batch: SequenceBatch, *, restarts: int = RESTARTS, seed: int = 0) -> Dispatch:
    """Return the best dispatch found; the same for a seed, whatever the order of the batch.

    Raises `PlanError` when no pipeline can hold the longest sequence.
    """
    check_holds(strategy, batch)
    bound = math.inf  # of one pipeline nothing is asked

    def bound_below(seconds: float) -> float:
        nonlocal bound
        bound = dispatch_bound(strategy, batch, seconds)
        return bound

    falling = sorted(batch.lengths, reverse=True)
    seconds = {scheme: scheme.times.all_seconds(falling) for scheme in set(strategy.pipelines)}
    problem = Assigning.of(strategy.pipelines, [seconds[scheme] for scheme in strategy.pipelines], falling)
    receivers = assign(problem, Effort(restarts, seed, bound_below, _RENEWED_ITEMS))
    assert receivers is not None  # the first pipeline holds everything
    groups: list[list[int]] = [[] for _ in strategy.pipelines]
    for length, receiver in zip(falling, receivers.tolist(), strict=True):
        groups[receiver].append(length)
    return of_lengths(strategy, batch, groups, bound)


def of_lengths(
    strategy: Strategy, batch: SequenceBatch, groups: Sequence[Sequence[int]], bound_seconds: float
) -> Dispatch:
    """Return the dispatch that gives each pipeline sequences of these lengths, of equal ones the earlier first."""
    positions: dict[int, list[int]] = {}
    for position in reversed(range(len(batch.lengths))):
        positions.setdefault(batch.lengths[position], []).append(position)
    pipelines = tuple(tuple(positions[length].pop() for length in group) for group in groups)
    found = Dispatch(strategy, batch, pipelines)
    return replace(found, bound_seconds=min(bound_seconds, found.seconds))


def _check_lengths(scheme: Scheme, lengths: dict[int, int]) -> None:
    long = {position: length for position, length in lengths.items() if length > scheme.max_length}
    if long:
        raise PlanError(
            f"a dispatch gives {scheme} sequences of {long} tokens (by position), but it holds at most "
            f"{scheme.max_length}; give them to a pipeline that holds them"
        )
