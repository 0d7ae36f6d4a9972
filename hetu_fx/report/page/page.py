"""The report of a run: its sections, in order, as one HTML page that needs nothing from elsewhere, and as JSON.

Words are never inside pictures, which are stretched to the width of the window: so they stay as large as the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hetu_fx.base.markup import CLASS, STYLE
from hetu_fx.report.page import changes, cluster, gathered, losses, memory, plans, steps, timeline, traffic
from hetu_fx.report.run import LoggedRun
from hetu_fx.report.run_log import Entry
from hetu_fx.report.summary import entry_text

_STYLE = """
:root{color-scheme:light dark}
body{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--link)}nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}
pre{overflow:auto;max-height:32rem;background:var(--soft);padding:.7rem;border-radius:4px;font-size:.85rem;
overflow-wrap:normal}
svg{display:block;width:100%;background:var(--soft)}svg *{vector-effect:non-scaling-stroke}
.plot svg{height:200px}.axis{display:flex;justify-content:space-between;font-size:.85rem;color:var(--quiet)}
.lanes{overflow-y:auto;max-height:38rem;margin:.5rem 0}
.lane{display:grid;grid-template-columns:6.5rem 1fr;align-items:center;font-size:.85rem}
.lane svg{height:1.5rem}.lane.more svg{height:.8rem}.lane.more{color:var(--quiet);margin-bottom:.3rem}
"""


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
    "gathered": Section("What is gathered, as no rule splits it", gathered.html, gathered.data),
    "cluster": Section("Cluster", cluster.html, cluster.data),
    "plans": Section("Plans", plans.html, plans.data),
    "changes": Section("What changed", changes.html, changes.data),
}
"""All sections by their key in JSON, which is their anchor on the page."""


def html_page(log: Sequence[Entry], title: str) -> str:
    """Return the page of a log that `read_log` has read."""
    run = LoggedRun(log)
    bodies = {key: section.html(run) for key, section in SECTIONS.items()}
    shown = {key: body for key, body in bodies.items() if body}
    contents = " ".join(f'<a href="#{key}">{escape(SECTIONS[key].title)}</a>' for key in shown)
    sections = "\n".join(_section(key, body) for key, body in shown.items())
    name, start = escape(title), escape(entry_text(log[0]))
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{meta}<title>{name}</title><style>{STYLE}{_STYLE}</style></head>\n'
        f'<body class="{CLASS}"><h1>{name}</h1>\n<p>{start}</p>\n<nav>{contents}</nav>\n{sections}\n</body></html>\n'
    )


def _section(key: str, body: str) -> str:
    return f'<section><h2 id="{key}">{escape(SECTIONS[key].title)}</h2>\n{body}\n</section>'


def report_json(log: Sequence[Entry]) -> dict[str, Any]:
    """Return what the page says as what JSON can say, by the keys of `SECTIONS`."""
    run = LoggedRun(log)
    return {"processes": run.processes, **{key: section.data(run) for key, section in SECTIONS.items()}}
