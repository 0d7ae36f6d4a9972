"""What is gathered because no rule splits it: by which op, what that takes in a step, and what would avoid it."""

from __future__ import annotations

from html import escape
from typing import Any

from hetu_fx.base.markup import note, table
from hetu_fx.planner.values.gathered_op import GATHERED_OP, HEADER, remarks
from hetu_fx.report.run import LoggedRun


def data(run: LoggedRun) -> dict[str, Any]:
    """Return the ops of each variant that gathers something, each with what would avoid it."""
    return {
        name: [{**GATHERED_OP.write(one), "cure": one.cure} for one in found] for name, found in run.gathered.items()
    }


def html(run: LoggedRun) -> str:
    """Return a table for each of these variants."""
    tables = {name: table(HEADER, [one.cells for one in found]) for name, found in run.gathered.items()}
    return "".join(
        f"<h3>{escape(name)}</h3>{shown}{''.join(map(note, remarks(run.gathered[name])))}"
        for name, shown in tables.items()
    )
