"""`hetu-fx plan`: show a plan file, or make a plan from a cluster file and a profile file, and explain it.

What-if options: devices gone, devices slower, another link between nodes. `--sweep` asks which devices pay
with which batch and which link, as a table and in words.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetu_fx.base.checks import parse_rate
from hetu_fx.base.documents import json_text
from hetu_fx.base.progress import telling
from hetu_fx.base.words import ranks_text, rate_text, seconds_text
from hetu_fx.cli.files import NAMES, add_files, read_files
from hetu_fx.cli.given import check_folder
from hetu_fx.cli.what_if import add_changes, apply_what_if, change_lines, changes_text, differences, with_link
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
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


def _show_sweep(problem: Problem, options: argparse.Namespace) -> int:
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


_CHANGES = ("without", "rate", "link", "sweep")
_NEED_BOTH = ("search", *NAMES, "allow", "forbid", "zero", "seconds", "before", "steps", *_CHANGES)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx plan`."""
    parser.usage = (
        "hetu-fx plan FILE [--against OTHER]\n"
        "       hetu-fx plan --cluster C --profile P [--search NAME] [--without R ...] [options]"
    )
    parser.add_argument("file", nargs="?", help="a plan file (hetu_fx.plan/1) to show, or to price on the cluster")
    parser.add_argument("--against", metavar="OTHER", help="show what changes from another plan file")
    add_files(parser)
    parser.add_argument("--search", metavar="NAME", help="how to search, one of those below (default: auto)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the plan file; where the search finds several, one per length"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    _add_choice(parser)
    parser.add_argument("--no-cache", action="store_true", help="search again, even if this question has been answered")
    add_changes(parser)


def more_of_plan() -> str:
    """Return the names that options take, a line each."""
    from hetu_fx.planner.searches import SEARCHES
    from hetu_fx.planner.values.options import FEATURES

    searches = {name: search.applies for name, search in SEARCHES.items()}
    features = {name: feature.told for name, feature in FEATURES.items()}
    return f"\nsearches:\n{_lines(searches)}\n\nnames to allow or forbid:\n{_lines(features)}\n"


def _lines(told: Mapping[str, str]) -> str:
    width = max(map(len, told))
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in told.items())


def call_plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx plan`."""
    if options.out is not None:
        check_folder("--out", options.out, PlanError)
    is_given = options.cluster is None and options.profile is None
    if options.sweep and not is_given:
        return _show_sweep(_problem(options), options)
    plans, changes = ((_given(options),), []) if is_given else _answer(options)
    _write(plans, options.out)
    if options.json:
        values = [plan.to_json() for plan in plans]
        print(json_text(values[0] if len(values) == 1 else values))
    elif options.against is not None:
        other = Plan.read(options.against)
        for plan in plans:
            print("\n".join(change_lines(other, plan)))
    else:
        for plan in plans:
            _show(plan)
        for line in changes:
            print(line)
    return 0


def _given(options: argparse.Namespace) -> Plan:
    """Return the plan of a file that is only shown; raises `PlanError` for what needs a cluster and a profile."""
    asked = [name for name in _NEED_BOTH if getattr(options, name) not in (None, [])]
    if options.file is None or asked:
        what = f"--{asked[0]}" if asked else "planning"
        raise PlanError(f"{what} needs --cluster FILE and --profile FILE\nhint: to show a plan file, name it alone")
    return Plan.read(options.file)


def _answer(options: argparse.Namespace) -> tuple[tuple[Plan, ...], list[str]]:
    """Return the plans for a cluster file and a profile file, and what is different where something was changed."""
    problem = _problem(options)
    other = replace(problem, cluster=apply_what_if(problem.cluster, options))
    from hetu_fx.planner.left_out import with_reasons

    after = tuple(with_reasons(plan, other) for plan in _plans(other, options))
    return after, [] if other == problem else differences(_plans(problem, options), after, changes_text(options))


def _problem(options: argparse.Namespace) -> Problem:
    profile, cluster = read_files(options, "a plan is made")
    from hetu_fx.planner.search.problem import Problem
    from hetu_fx.planner.values.options import Choice, PlanOptions

    names = ("allow", "forbid", "zero", "seconds")
    choice = Choice.of(**{name: getattr(options, name) for name in names})
    plan_options = PlanOptions.of_program(mixes_rows=profile.mixes_rows, choice=choice)
    before, steps = _running(options)
    return Problem(profile, cluster, plan_options, before, steps)


def _running(options: argparse.Namespace) -> tuple[Plan | None, float]:
    """Return the plan that the job runs and the steps that are left; one says nothing without the other."""
    if (options.before is None) != (options.steps is None):
        missing = "--before FILE" if options.before is None else "--steps N"
        raise PlanError(
            f"getting from the plan that runs is spread over the steps that are left\nhint: give {missing} too"
        )
    return (None, math.inf) if options.before is None else (Plan.read(options.before), options.steps)


def _plans(problem: Problem, options: argparse.Namespace) -> tuple[Plan, ...]:
    """Search, or price the plan that was named."""
    from hetu_fx.planner.make_plan import default_folder, make_or_find_plans, make_plans, with_prediction
    from hetu_fx.planner.searches import DEFAULT

    search = options.search or DEFAULT
    if options.file is not None:
        plan = Plan.read(options.file)
        plan.check(num_blocks=problem.costs.num_blocks, world_size=max(problem.cluster.ranks) + 1)
        return (with_prediction(plan, problem),)
    with telling("planning") as tell:
        told = replace(problem, tell=tell)
        return make_plans(told, search) if options.no_cache else make_or_find_plans(told, search, default_folder())


def _write(plans: Sequence[Plan], path: Path | None) -> None:
    for plan in plans if path is not None else ():
        assert path is not None
        several = len(plans) > 1
        plan.write(path.with_stem(f"{path.stem}-{plan.max_length or 'any'}") if several else path)


def _show(plan: Plan) -> None:
    """Print a plan, what each device does, what bounds the step and the runner-up."""
    print(plan if plan.predicted is None else plan.explain())
    if plan.predicted is None:
        print("no prediction: the plan was given, not priced")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say what plans may do."""
    for name, what in (("allow", "what else plans may do"), ("forbid", "what plans must not do")):
        parser.add_argument(
            f"--{name}", nargs="+", action="extend", default=[], metavar="NAME", help=f"{what}, names below"
        )
    parser.add_argument(
        "--zero",
        type=int,
        metavar="{0,1,2,3}",
        help="what replicas share: nothing, optimizer states, gradients too, parameters too",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="give the best plan so far after this time, and what it may lack"
    )
    parser.add_argument(
        "--before", metavar="FILE", help="the plan that the job runs now: getting from there counts too"
    )
    parser.add_argument(
        "--steps",
        type=float,
        metavar="N",
        help="the steps that are left, over which the move is spread (needs --before)",
    )
