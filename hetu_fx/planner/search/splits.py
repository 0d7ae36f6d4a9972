"""What groups may split besides what they would: the experts of a mixture.

By themselves groups split what spreads most work for least communication, inside of experts their width. Whole experts
can be spread instead, which moves as much, leaves rows uncut, and has other parts: more where there are many narrow
experts, so that unlike devices end together; and more than there are heads, which larger groups leave whole. A search
is asked again for what the program costs then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hetu_fx.planner.search.problem import Candidates, CapturedCosts, Problem, widest
from hetu_fx.planner.values.program import ProgramCosts

if TYPE_CHECKING:
    from hetu_fx.transforms.layouts.work_shares import Split

Find = Callable[[Problem], Candidates]


def in_all_splits(find: Find) -> Find:
    """Return a search that finds plans for each way to split a captured program."""

    def found_in_all(problem: Problem) -> Candidates:
        found = dict(find(problem))
        captured = problem.captured
        if captured is None or not problem.options.tensor_parallel or "experts" in problem.options.off:
            return found
        for split in captured.splits:
            for costs in _costs_of(split, captured, len(problem.cluster.devices)):
                if problem.time_limit.ends(found):
                    return found
                profile = replace(problem.profile, costs=costs)
                plans = find(replace(problem, profile=profile, captured=None))
                asked = {replace(plan, split=split): seconds for plan, seconds in plans.items() if widest(plan) > 1}
                found |= {plan: seconds for plan, seconds in asked.items() if problem.costs_of(plan) is costs}
        return found

    return found_in_all


def _costs_of(split: Split, captured: CapturedCosts, most: int) -> Iterator[ProgramCosts]:
    """Yield the costs for groups of up to `most` devices: those that split more besides, and larger ones."""
    narrow = captured.costs_of(split)
    yield narrow
    larger = captured.costs_of(split, narrow.units + 1)
    if narrow.units < most and larger is not narrow:
        yield larger
