"""The plans of a run: who computes what, what that was predicted to take, and why."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.report.page.markup import note
from hetu_fx.report.run import LoggedRun

MOST = 8
"""More plans than these stand in the log, and not on the page."""


def data(run: LoggedRun) -> dict[str, Any]:
    """Return all plans by variant, as their files have them."""
    return {name: plan.to_json() for name, plan in run.plans.items()}


def html(run: LoggedRun) -> str:
    """Return the plans of variants that have trained."""
    shown = run.shown[:MOST]
    texts = (f'<h3>{escape(name)}</h3><pre tabindex="0">{escape(run.plans[name].explain())}</pre>' for name in shown)
    left = len(run.plans) - len(shown)
    return "".join(texts) + note(f"{left} more are in the log, whose variants have not trained.") * bool(shown and left)
