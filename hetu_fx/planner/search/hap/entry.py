"""The HAP search, as the table of searches knows it; what reads graphs is imported when it is asked, and torch then."""

from __future__ import annotations

from hetu_fx.planner.search.problem import Candidates, Problem, Search


def _find(problem: Problem) -> Candidates:
    from hetu_fx.planner.search.hap.adapter import find_plans

    return find_plans(problem)


def _find_programs(problem: Problem) -> Candidates:
    from hetu_fx.planner.search.hap.adapter import find_programs

    return find_programs(problem)


def _lacks(problem: Problem) -> str:
    if problem.captured is not None:
        return ""
    return (
        "it plans op by op and needs the captured graph, which profiles do not hold; use hetu_fx.plan(model, batch, "
        "search='hap'), or 'auto', 'homogeneous', 'classes' or 'contiguous' for a profile"
    )


HAP = Search(
    name="hap",
    applies="captured models, any: rows or parts of the widths that pay, op by op, in proportion to unlike devices",
    lacks=_lacks,
    find=_find,
)

PROGRAMS = Search(
    name="programs",
    applies="captured models, any: the plans of `hap` that carry its program",
    lacks=_lacks,
    find=_find_programs,
)
