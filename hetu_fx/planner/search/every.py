"""Ask several searches, and let the one cost say whose plan is best."""

from __future__ import annotations

from collections.abc import Sequence

from hetu_fx.planner.search.problem import Candidates, Problem, Search
from hetu_fx.plans import Plan


def every(searches: Sequence[Search]) -> Search:
    """Return the search that asks all of these that lack nothing. They must answer with one plan for any length."""

    def find(problem: Problem) -> Candidates:
        found: dict[Plan, float] = {}
        for search in searches:
            found |= {} if search.lacks(problem) else search.find(problem)
        return found

    names = " and ".join(f"`{search.name}`" for search in searches)
    return Search("every", f"any devices, where time is left to ask both {names}", lambda problem: "", find)
