"""`hetu-fx plan --sweep`: which devices pay with which batch and which link between nodes, as a table and in words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetu_fx.base.progress import telling
from hetu_fx.base.words import ranks_text, rate_text, seconds_text
from hetu_fx.cli.what_if import with_link
from hetu_fx.errors import PlanError
from hetu_fx.launch.emulate.spec import parse_rate
from hetu_fx.plans.tables import short_text
from hetu_fx.show.table import print_table

if TYPE_CHECKING:
    from hetu_fx.planner.search.problem import Problem

_AXES = "rows", "link"
_HEADER = ("rows", "link", "step", "rows/s", "devices", "plan")


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of a sweep: for so many rows and such a link between nodes (bits a second; None: the cluster's)."""

    rows: int
    link: float | None
    devices: tuple[int, ...]
    seconds: float
    plan: str

    @property
    def where(self) -> list[str]:
        """Return the cells that say what it is for."""
        return [str(self.rows), "as it is" if self.link is None else rate_text(self.link, "bit/s")]

    @property
    def cells(self) -> list[str]:
        """Return the cells under `_HEADER`."""
        figures = seconds_text(self.seconds), f"{self.rows / self.seconds:.4g}", ranks_text(self.devices)
        return [*self.where, *figures, self.plan]


def show_sweep(problem: Problem, options: argparse.Namespace) -> int:
    """Print a row for each number of rows and each link, and from where on more devices pay."""
    axes = _axes(options.sweep)
    links: Sequence[float | None] = sorted(map(parse_rate, axes.get("link", ()))) or (None,)
    rows = sorted(map(_rows, axes.get("rows", ()))) or [problem.costs.rows]
    with telling("planning") as tell:
        points = []
        for number, (count, link) in enumerate([(count, link) for count in rows for link in links], 1):
            points.append(_point(problem, options.search, count, link))
            tell("plans", number, len(rows) * len(links))
    if options.json:
        print(json.dumps([{name: getattr(point, name) for name in Point.__slots__} for point in points], indent=2))
        return 0
    print_table(_HEADER, [point.cells for point in points])
    print("\n".join(_gains(points)))
    return 0


def _axes(given: Sequence[str]) -> dict[str, list[str]]:
    axes = {name: values.split(",") for name, _, values in (text.partition("=") for text in given)}
    if not axes.keys() <= {*_AXES} or not all(map(all, axes.values())):
        raise PlanError(f"--sweep {' '.join(given)} is no sweep\nhint: --sweep rows=64,256 link=10gbit,100gbit")
    return axes


def _rows(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise PlanError(f"--sweep rows={text} names no whole numbers\nhint: write it like rows=64,256")
    return int(text)


def _point(problem: Problem, search: str | None, rows: int, link: float | None) -> Point:
    from hetu_fx.planner.make_plan import make_plans
    from hetu_fx.planner.searches import DEFAULT

    cluster = problem.cluster if link is None else with_link(problem.cluster, link, f"--sweep link={link:g}bit")
    *_, plan = make_plans(replace(problem, profile=problem.profile.with_rows(rows), cluster=cluster), search or DEFAULT)
    assert plan.predicted is not None
    return Point(rows, link, tuple(sorted(plan.devices)), plan.predicted.seconds, short_text(plan.pipelines))


def _gains(points: Sequence[Point]) -> Iterator[str]:
    """Yield from which link and rows on devices are used that fewer of both leave out."""
    seen: set[int] = set()
    for point in sorted(points, key=lambda point: (point.rows, point.link or 0.0)):
        new = {*point.devices} - seen
        if seen and new:
            rows, link = point.where
            at = f"{rows} rows a step" + ("" if point.link is None else f" and {link} between nodes")
            yield f"from {at} on devices {ranks_text(new)} pay"
        seen |= new
    if len({point.devices for point in points}) == 1:
        yield f"all of these use devices {ranks_text(points[0].devices)}"
