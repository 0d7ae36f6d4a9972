"""The searches that there are. A new one is a file beside these and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.base.documents import nearest
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.auto import (
    SearchRule,
    always,
    auto,
    both,
    devices_differ,
    either,
    kinds_differ,
    some_straggle,
    up_to,
    without_blocks,
)
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.hap.adapter import HAP
from hetu_fx.planner.search.heteroauto.adapter import HETEROAUTO
from hetu_fx.planner.search.homogeneous import HOMOGENEOUS
from hetu_fx.planner.search.hydraulis.adapter import HYDRAULIS
from hetu_fx.planner.search.malleus.adapter import MALLEUS
from hetu_fx.planner.search.problem import Search
from hetu_fx.planner.search.regions import CLASSES

_SMALL = 6  # devices of a cluster whose runs are gone through one by one within seconds, whatever they are
_LARGE = 512  # devices of a cluster of several kinds that is searched for more than equal pipelines within seconds

AUTO = auto(
    HYDRAULIS,
    (
        SearchRule(HOMOGENEOUS, always),
        SearchRule(CLASSES, always),
        SearchRule(CONTIGUOUS, up_to(_SMALL)),
        SearchRule(MALLEUS, both(devices_differ, either(some_straggle, up_to(_LARGE)))),
        SearchRule(HETEROAUTO, both(kinds_differ, up_to(_LARGE))),
        SearchRule(HAP, without_blocks(_SMALL)),
    ),
)

SEARCHES: Mapping[str, Search] = {
    search.name: search for search in (AUTO, HOMOGENEOUS, CLASSES, CONTIGUOUS, MALLEUS, HETEROAUTO, HYDRAULIS, HAP)
}

DEFAULT = AUTO.name


def find_search(name: str) -> Search:
    """Return the search of a name; raises `PlanError` with the names that there are."""
    if name not in SEARCHES:
        raise PlanError(f"unknown search {name!r}{nearest(name, tuple(SEARCHES))}")
    return SEARCHES[name]
