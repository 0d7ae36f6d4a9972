"""What changed while it ran: plans, variants, homes, graphs, the devices' health."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.base.markup import note
from hetu_fx.report.run import LoggedRun
from hetu_fx.report.summary import CHANGES, entry_text

MOST = 300
"""So many of the last changes stand on the page."""


def data(run: LoggedRun) -> list[dict[str, Any]]:
    """Return all changes, as the log has them."""
    return [dict(entry) for entry in run.log if entry["event"] in CHANGES]


def html(run: LoggedRun) -> str:
    """Return a line for each of the last ones."""
    changes = data(run)
    lines = "\n".join(map(entry_text, changes[-MOST:]))
    left = len(changes) - MOST
    told = note(f"The last {MOST} of {len(changes)} changes; hetu-fx log lists all.") * (left > 0)
    return told + f'<pre tabindex="0">{escape(lines)}</pre>' if changes else ""
