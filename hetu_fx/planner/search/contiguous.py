"""The search over runs of devices in a few orders, as the table of searches knows it."""

from __future__ import annotations

from hetu_fx.planner.contiguous import search
from hetu_fx.planner.search.problem import Search

CONTIGUOUS = Search(
    name="homogeneous+contiguous",
    applies="always: equal devices, and unequal ones whose groups stand side by side in order of speed or node",
    lacks=lambda problem: "",
    find=lambda problem: search(problem.costs, problem.cluster, problem.options, problem.tell),
)
