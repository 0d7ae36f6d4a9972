"""What a run has told, as it stands in the log: its cluster, plans, changes, and what was gathered."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.planner.values.gathered_op import GATHERED_OP, HEADER, remarks
from hetu_fx.plans.plan import Plan
from hetu_fx.report.run import LoggedRun
from hetu_fx.report.summary import CHANGES, entry_text
from hetu_fx.show.markup import note, table

MOST_PLANS = 8
"""More plans than these stand in the log, and not on the page."""

MOST_CHANGES = 300
"""So many of the last changes stand on the page."""

UNKNOWN = (
    "Nobody has told what the devices are, so nothing was predicted: give auto_parallelize a cluster, or plan='auto', "
    "which measures them."
)


def cluster(run: LoggedRun) -> dict[str, Any] | None:
    """Return the devices and links that plans were made for, as their file has them; None where nobody knows."""
    return None if run.cluster is None else run.cluster.to_json()


def cluster_html(run: LoggedRun) -> str:
    """Return their table."""
    return note(UNKNOWN) if run.cluster is None else _text(str(run.cluster))


def plans(run: LoggedRun) -> dict[str, Any]:
    """Return all plans by variant, as their files have them."""
    return {name: plan.to_json() for name, plan in run.plans.items()}


def plans_html(run: LoggedRun) -> str:
    """Return the plans of variants that have trained, as pictures and in words."""
    shown = run.shown[:MOST_PLANS]
    left = len(run.plans) - len(shown)
    told = "".join(_plan(name, run.plans[name]) for name in shown)
    return told + note(f"{left} more are in the log, whose variants have not trained.") * bool(shown and left)


def _plan(name: str, plan: Plan) -> str:
    return f"<h3>{escape(name)}</h3>{plan.html()}{_text(plan.explain())}"


def changes(run: LoggedRun) -> list[dict[str, Any]]:
    """Return all changes while it ran, of plans, variants, homes, graphs and health, as the log has them."""
    return [dict(entry) for entry in run.log if entry["event"] in CHANGES]


def changes_html(run: LoggedRun) -> str:
    """Return a line for each of the last ones."""
    found = changes(run)
    left = len(found) - MOST_CHANGES
    told = note(f"The last {MOST_CHANGES} of {len(found)} changes; hetu-fx log lists all.") * (left > 0)
    return told + _text("\n".join(map(entry_text, found[-MOST_CHANGES:]))) if found else ""


def gathered_ops_by_variant(run: LoggedRun) -> dict[str, Any]:
    """Return the ops of each variant that gather because no rule splits them, each with what would avoid it."""
    return {
        name: [{**GATHERED_OP.write(one), "cure": one.cure} for one in found] for name, found in run.gathered.items()
    }


def gathered_html(run: LoggedRun) -> str:
    """Return a table for each of these variants."""
    return "".join(
        f"<h3>{escape(name)}</h3>{table(HEADER, [one.cells for one in found])}{''.join(map(note, remarks(found)))}"
        for name, found in run.gathered.items()
    )


def _text(lines: str) -> str:
    return f'<pre tabindex="0">{escape(lines)}</pre>'
