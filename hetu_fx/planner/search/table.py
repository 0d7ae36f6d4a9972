"""The searches that there are. A new one is a file beside these and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.documents import nearest
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.every import every
from hetu_fx.planner.search.hydraulis import HYDRAULIS
from hetu_fx.planner.search.malleus import MALLEUS
from hetu_fx.planner.search.problem import Search

_ONE_PLAN = (CONTIGUOUS, MALLEUS)  # these answer with one plan for sequences of any length

SEARCHES: Mapping[str, Search] = {search.name: search for search in (*_ONE_PLAN, HYDRAULIS, every(_ONE_PLAN))}

DEFAULT = CONTIGUOUS.name


def find_search(name: str) -> Search:
    """Return the search of a name; raises `PlanError` with the names that there are."""
    if name not in SEARCHES:
        raise PlanError(f"unknown search {name!r}{nearest(name, tuple(SEARCHES))}")
    return SEARCHES[name]
