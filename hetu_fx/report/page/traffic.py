"""What the messages of a step carry, as plans say: bytes by kind, and by link."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from hetu_fx.base.words import bytes_text
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.report.run import LoggedRun
from hetu_fx.show.lanes import COLORS, OTHER
from hetu_fx.show.markup import bar, cells_table, keys, note

KINDS: Mapping[str, str] = {
    "gather": "parameters from their homes",
    "send": "activations and their gradients, between stages",
    "communication": "inside stages",
    "gradients": "gradients to their homes",
}
"""What kinds of the simulator's messages are."""

MOST_LINKS = 200
"""So many links stand on the page, those that carry most."""


def data(run: LoggedRun) -> dict[str, Any]:
    """Return the bytes of a step of each variant, by kind and by link (sender, receiver)."""
    return {name: {"by_kind": by_kind(step), "by_link": _links(step)} for name, step in run.on_paper.items()}


def by_kind(step: Simulation) -> dict[str, float]:
    """Return the bytes by what they are."""
    found = dict.fromkeys(KINDS, 0.0)
    for (kind, _, _), count in step.sent_bytes.items():
        found[kind] = found.get(kind, 0.0) + count
    return {kind: count for kind, count in found.items() if count}


def _links(step: Simulation) -> list[dict[str, Any]]:
    return [{"sender": a, "receiver": b, "bytes": count} for (a, b), count in step.link_bytes.items()]


def html(run: LoggedRun) -> str:
    """Return both as tables; nothing where nobody sends anything."""
    steps = {name: step for name, step in run.on_paper.items() if step.sent_bytes}
    if not steps:
        return ""
    kinds = dict.fromkeys(kind for step in steps.values() for kind in by_kind(step))
    colours = {KINDS.get(kind, kind): COLORS.get(kind, OTHER) for kind in kinds}
    return (
        keys(colours)
        + "".join(f"<h3>{escape(name)}</h3>{_table(step)}" for name, step in steps.items())
        + note("Bytes as the plan sends them; what processes agree on before a step, and the loss, are not in it.")
    )


def _table(step: Simulation) -> str:
    links = sorted(step.link_bytes.items(), key=lambda pair: -pair[1])
    most, kinds = links[0][1], by_kind(step)
    rows = [_row(step, link, count, most) for link, count in links[:MOST_LINKS]]
    left = len(links) - MOST_LINKS
    total = ", ".join(f"{KINDS.get(kind, kind)} {bytes_text(count)}" for kind, count in kinds.items())
    more = note(f"{left} more links carry less each.") * (left > 0)
    return (
        note(f"In all {bytes_text(sum(kinds.values()))}: {total}.")
        + cells_table(["link", "bytes", "by kind"], rows)
        + more
    )


def _row(step: Simulation, link: tuple[int, int], count: float, most: float) -> list[str]:
    own = {kind: size for (kind, *ends), size in step.sent_bytes.items() if tuple(ends) == link}
    parts = [
        (f"{KINDS.get(kind, kind)}: {bytes_text(size)}", size, COLORS.get(kind, OTHER)) for kind, size in own.items()
    ]
    return [f"{link[0]} → {link[1]}", bytes_text(count), bar(parts, most)]
