"""The devices and links that plans were made for."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.base.markup import note
from hetu_fx.report.run import LoggedRun

UNKNOWN = (
    "Nobody has told what the devices are, so nothing was predicted: give auto_parallelize a cluster, or plan='auto', "
    "which measures them."
)


def data(run: LoggedRun) -> dict[str, Any] | None:
    """Return the cluster as its file has it; None where nobody knows."""
    return None if run.cluster is None else run.cluster.to_json()


def html(run: LoggedRun) -> str:
    """Return its table."""
    return note(UNKNOWN) if run.cluster is None else f'<pre tabindex="0">{escape(str(run.cluster))}</pre>'
