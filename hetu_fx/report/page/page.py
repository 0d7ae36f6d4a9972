"""The report of a run: its sections, in order, as one HTML page that needs nothing from elsewhere, and as JSON.

Words are never inside pictures, which are stretched to the width of the window: so they stay as large as the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hetu_fx.report.page import losses, memory, steps, timeline, told, traffic
from hetu_fx.report.run import LoggedRun, read_run
from hetu_fx.report.summary import entry_text
from hetu_fx.report.updates import Entry
from hetu_fx.show.markup import page


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report.

    Attributes:
        title: on the page.
        html: returns what stands below it; "" leaves the section out.
        data: returns the same as what JSON can say.
    """

    title: str
    html: Callable[[LoggedRun], str]
    data: Callable[[LoggedRun], Any]


SECTIONS: Mapping[str, Section] = {
    "variants": Section("Variants", steps.variants_html, steps.variants),
    "losses": Section("Loss", losses.html, losses.data),
    "steps": Section("Seconds of each step", steps.html, steps.data),
    "timeline": Section("One step: predicted and measured", timeline.html, timeline.data),
    "memory": Section("Memory", memory.html, memory.data),
    "traffic": Section("Traffic of one step", traffic.html, traffic.data),
    "gathered": Section("What is gathered, as no rule splits it", told.gathered_html, told.gathered_ops_by_variant),
    "cluster": Section("Cluster", told.cluster_html, told.cluster),
    "plans": Section("Plans", told.plans_html, told.plans),
    "changes": Section("What changed", told.changes_html, told.changes),
}
"""All sections by their key in JSON, which is their anchor on the page."""


def html_page(log: Sequence[Entry], title: str) -> str:
    """Return the page of a log that `read_log` has read."""
    run = read_run(log)
    bodies = {key: section.html(run) for key, section in SECTIONS.items()}
    shown = {key: body for key, body in bodies.items() if body}
    contents = " ".join(f'<a href="#{key}">{escape(SECTIONS[key].title)}</a>' for key in shown)
    sections = "\n".join(_section(key, body) for key, body in shown.items())
    return page(title, f"<p>{escape(entry_text(log[0]))}</p>\n<nav>{contents}</nav>\n{sections}")


def _section(key: str, body: str) -> str:
    return f'<section><h2 id="{key}">{escape(SECTIONS[key].title)}</h2>\n{body}\n</section>'


def report_json(log: Sequence[Entry]) -> dict[str, Any]:
    """Return what the page says as what JSON can say, by the keys of `SECTIONS`."""
    run = read_run(log)
    return {"processes": run.processes, **{key: section.data(run) for key, section in SECTIONS.items()}}
