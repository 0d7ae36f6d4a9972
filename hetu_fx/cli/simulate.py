"""`hetu-fx simulate`: run a step of a plan on paper: a table, JSON, a Chrome trace, a page with memory over time.

What devices do when, by the costs that planning has: waiting, overlap, links that messages share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetu_fx.base.words import bytes_text, format_used_bytes, ranks_text, seconds_text, share_text
from hetu_fx.cli.files import add_files, read_files
from hetu_fx.cli.given import check_folder
from hetu_fx.cli.what_if import add_changes, apply_what_if
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.tables import alike, short_text
from hetu_fx.show.lanes import write_html
from hetu_fx.show.table import table_text
from hetu_fx.show.timeline import Timeline

if TYPE_CHECKING:
    from hetu_fx.planner.simulate.simulation import Simulation

FORMAT = "hetu_fx.simulation/1"
PICTURE = ".html"
_HEADER = ("device", "peak memory", "at", "bubble")
_MOST_LINKS = 6  # of which the table tells
_MOST_DRAWN = 32  # devices of a page


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx simulate`."""
    parser.usage = "hetu-fx simulate --plan PLAN --cluster C --profile P [--trace FILE] [--picture FILE] [options]"
    parser.add_argument("--plan", metavar="FILE", required=True, help="the plan (hetu_fx.plan/1)")
    add_files(parser)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else, with memory over time")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, for Perfetto")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it as a page (.html)")
    add_changes(parser)


def call_simulate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx simulate`."""
    _check_places(options)
    profile, cluster = read_files(options, "a step is simulated")
    from hetu_fx.planner.simulate.simulate import simulate

    cluster = apply_what_if(cluster, options)
    plan = Plan.read(options.plan)
    strangers = sorted(set(plan.devices) - set(cluster.ranks))
    if strangers:
        raise PlanError(f"the plan uses devices {strangers}, but the cluster has {ranks_text(cluster.ranks)} only")
    plan = plan.with_blocks(profile.costs.num_blocks)
    made = simulate(plan, profile.costs, cluster)
    if options.trace is not None:
        made.timeline.write_chrome(options.trace)
    if options.picture is not None:
        write_html(_picture_of(made, plan), options.picture)
    print(json.dumps(to_json(made, plan, cluster)) if options.json else "\n".join(_text_of(made, plan, cluster)))
    return 0


def _check_places(options: argparse.Namespace) -> None:
    """Raise `PlanError` for files that cannot be written, or pages of a kind that is not known."""
    for name in ("trace", "picture"):
        path = getattr(options, name)
        if path is not None:
            check_folder(f"--{name}", path, PlanError)
    if options.picture is not None and options.picture.suffix != PICTURE:
        raise PlanError(f"--picture {options.picture} has ending {options.picture.suffix!r}\nhint: use {PICTURE!r}")


def _text_of(made: Simulation, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yield the lines of a simulation: its seconds, what devices hold, and the links that carry most."""
    yield f"simulated step: {seconds_text(made.seconds)}"
    yield made.why
    yield table_text(_HEADER, list(_device_rows(made, plan, cluster)))
    carried = sorted(made.link_bytes.items(), key=lambda pair: (-pair[1], pair[0]))
    if carried:
        rows = [[f"{one} -> {other}", bytes_text(count)] for (one, other), count in carried[:_MOST_LINKS]]
        yield table_text(("link", "carries"), rows)
    if len(carried) > _MOST_LINKS:
        left = carried[_MOST_LINKS:]
        yield f"{len(left)} other links carry {bytes_text(sum(count for _, count in left))}"


def _device_rows(made: Simulation, plan: Plan, cluster: Cluster) -> Iterator[list[str]]:
    """Yield a row for the like stages of a plan: of several devices that which holds most of what it has."""
    curves = made.timeline.memory
    for found in alike(plan.pipelines):
        ranks = [rank for group in found.groups for rank in group]
        limits = {rank: cluster.device(rank).memory_bytes for rank in ranks}
        fullest = max(ranks, key=lambda rank: (made.peak_bytes[rank] / limits[rank], -rank))
        peak, bubbles = made.peak_bytes[fullest], [made.bubbles[rank] for rank in ranks]
        when = max(curves[fullest], key=lambda pair: pair[1])[0]
        memory = f"{format_used_bytes(peak, limits[fullest])} ({share_text(peak / limits[fullest])})"
        ends = dict.fromkeys(share_text(share) for share in (min(bubbles), max(bubbles)))
        yield [ranks_text(ranks), memory, seconds_text(when), " to ".join(ends)]


def to_json(made: Simulation, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return a simulation: seconds, and by device its bubble and memory over time as (seconds, bytes)."""
    curves = made.timeline.memory
    devices = [
        {
            "rank": rank,
            "bubble": made.bubbles[rank],
            "peak_bytes": made.peak_bytes[rank],
            "memory_bytes": cluster.device(rank).memory_bytes,
            "memory": [[seconds, round(count)] for seconds, count in curves[rank]],
        }
        for rank in sorted(plan.devices)
    ]
    links = [{"from": one, "to": other, "bytes": count} for (one, other), count in made.link_bytes.items()]
    return {"format": FORMAT, "plan": plan.summary(), "seconds": made.seconds, "devices": devices, "links": links}


def devices_to_show(plan: Plan) -> tuple[int, ...]:
    """Return the devices that a picture has room for: one of each stage of like pipelines, if there are many."""
    if len(plan.devices) <= _MOST_DRAWN:
        return tuple(sorted(plan.devices))
    firsts = (found.groups[i][0] for found in alike(plan.pipelines) for i in range(len(found.positions)))
    return tuple(sorted(list(firsts)[:_MOST_DRAWN]))


def _picture_of(made: Simulation, plan: Plan) -> Timeline:
    """Return the timeline of the devices that are shown."""
    kept, whole = set(devices_to_show(plan)), made.timeline
    events = tuple(event for event in whole.events if event.device in kept)
    counters = tuple(counter for counter in whole.counters if counter.device in kept)
    left = len(plan.devices) - len(kept)
    name = f"simulated step: {short_text(plan.pipelines)}{f' (and {left} devices more)' if left else ''}"
    return Timeline(events, name, counters)
