"""The plans of a run: who computes what, what that was predicted to take, and why."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.base.markup import note
from hetu_fx.plans.picture import plan_html
from hetu_fx.plans.plan import Plan
from hetu_fx.report.run import LoggedRun

MOST = 8
"""More plans than these stand in the log, and not on the page."""


def data(run: LoggedRun) -> dict[str, Any]:
    """Return all plans by variant, as their files have them."""
    return {name: plan.to_json() for name, plan in run.plans.items()}


def html(run: LoggedRun) -> str:
    """Return the plans of variants that have trained."""
    shown = run.shown[:MOST]
    left = len(run.plans) - len(shown)
    told = "".join(_html(name, run.plans[name]) for name in shown)
    return told + note(f"{left} more are in the log, whose variants have not trained.") * bool(shown and left)


def _html(name: str, plan: Plan) -> str:
    """Return the plan as a picture and in words."""
    return f'<h3>{escape(name)}</h3>{plan_html(plan)}<pre tabindex="0">{escape(plan.explain())}</pre>'
