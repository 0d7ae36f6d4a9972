"""What `hetu-fx plan` asks of other devices or links, and what changes with them, as a table."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from hetu_fx.base.checks import parse_rate
from hetu_fx.base.words import ranks_text, seconds_text
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import ClusterError
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.tables import have_few_devices, rows_text, short_text
from hetu_fx.show.table import table_text

_WIDEST = 120  # columns of a table, however wide a terminal is
_NOT_ON_A_TERMINAL = (100, 24)


def differences(before: Sequence[Plan], after: Sequence[Plan], what: str) -> list[str]:
    """Return what other devices or links change, plan by plan."""
    lines = [f"what if {what}:"]
    for old, new in zip(before, after, strict=False):
        lines += change_lines(old, new)
    return lines


def change_lines(before: Plan, after: Plan) -> list[str]:
    """Return the table of what is not the same in two plans, and of their seconds; a line where all is the same."""
    told = [(key, was or "-", now or "-") for key, was, now in changes(before, after)]
    rows = [row for cells in [*_seconds_row(before, after), *told] for row in _wrapped(cells, _width(cells[0], told))]
    return [*([table_text(("", "before", "after"), rows)] if rows else []), *([] if told else ["no difference"])]


def _seconds_row(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    if before.predicted is not None and after.predicted is not None and before.predicted.seconds:
        was, now = before.predicted.seconds, after.predicted.seconds
        yield "predicted step", seconds_text(was), f"{seconds_text(now)} ({100 * (now / was - 1):+.1f} %)"


def _width(key: str, told: Sequence[tuple[str, str, str]]) -> int:
    """Return the letters that each of two columns has beside the longest name of a row."""
    columns = min(_WIDEST, shutil.get_terminal_size(_NOT_ON_A_TERMINAL).columns)
    longest = max(len("predicted step"), *(len(name) for name, *_ in told)) if told else len(key)
    return max(20, (columns - longest - 4) // 2)


def _wrapped(cells: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yield the rows that a row becomes whose cells have no room."""
    name, *texts = cells
    columns = [textwrap.wrap(text, width, break_on_hyphens=False) or [""] for text in texts]
    for number in range(max(map(len, columns))):
        yield [name if number == 0 else "", *(own[number] if number < len(own) else "" for own in columns)]


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--without", type=int, nargs="+", action="extend", default=[], metavar="R", help="what if these ranks are gone"
    )
    parser.add_argument(
        "--rate", nargs="+", action="extend", default=[], metavar="R=X", help="what if rank R takes X times as long"
    )
    parser.add_argument("--link", metavar="RATE", help="what if nodes are joined by a link like 100mbit")
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="X=A,B", help="plan for each of rows=64,256 and link=10gbit,100gbit"
    )


def apply_what_if(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    """Return the cluster with what the options change. Raises `ClusterError` for what cannot be."""
    gone, there = set(options.without), set(cluster.ranks)
    if not gone < there:
        raise ClusterError(
            f"--without {sorted(gone)}: the cluster has ranks {sorted(there)}\nhint: name some of them, not all"
        )
    from hetu_fx.planner.question import check_rates

    found = cluster.with_rates(dict(map(_rate, options.rate))).without(options.without)
    check_rates(found)
    if options.link is None:
        return found
    return with_link(found, parse_rate(options.link), f"--link {options.link}")


def changes_text(options: argparse.Namespace) -> str:
    """Return the changes as they were asked for."""
    gone = " ".join(map(str, options.without))
    parts = [f"without {gone}" if gone else "", *(f"rate {rate}" for rate in options.rate)]
    parts.append("" if options.link is None else f"link {options.link}")
    return ", ".join(part for part in parts if part)


def _rate(text: str) -> tuple[int, float]:
    rank, _, rate = text.partition("=")
    try:
        return int(rank), float(rate)
    except ValueError:
        raise ClusterError(
            f"{text!r} is not a rank and its straggling rate\nhint: write it like --rate 2=2.5"
        ) from None


def with_link(cluster: Cluster, bits_per_second: float, option: str) -> Cluster:
    """Return the cluster with another link between nodes; raises `ClusterError` for one of one node."""
    if len({device.node for device in cluster.devices}) == 1:
        raise ClusterError(f"{option} is the link between nodes, but the cluster has one node only")
    return cluster.with_inter(bits_per_second / 8)


def changes(before: Plan, after: Plan) -> list[tuple[str, str | None, str | None]]:
    """Return what is not the same in two plans, as (what, before, after); None where there is no such thing."""
    old, new = _facts(before), _facts(after)
    found = [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
    return [(key, was, now) for key, was, now in found if was != now]


def diff(before: Plan, after: Plan) -> str:
    """Return what changes from one plan to another, one line each, or `no difference`."""
    lines = [f"  {key}: {was} -> {now}" for key, was, now in changes(before, after) if was and now]
    gone = [f"- {key}: {was}" for key, was, now in changes(before, after) if now is None]
    come = [f"+ {key}: {now}" for key, was, now in changes(before, after) if was is None]
    return "\n".join([*gone, *come, *lines]) or "no difference"


def _facts(plan: Plan) -> dict[str, str]:
    facts = {"name": str(plan.name), "schedule": plan.schedule_text, "zero": str(plan.zero)}
    facts |= {"max_length": str(plan.max_length), "split": str(dict(plan.split))}
    facts["sequence_parallel"] = str(plan.sequence_parallel)
    if not have_few_devices(plan.pipelines):
        return facts | {"pipelines": short_text(plan.pipelines), "devices": ranks_text(plan.devices)}
    for index, pipeline in enumerate(plan.pipelines):
        facts[f"pipelines[{index}]"] = f"{rows_text(pipeline)}: {pipeline}"
    return facts
