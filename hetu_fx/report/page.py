"""The log of a run as one HTML page that needs nothing from elsewhere: variants, steps, devices, plans, changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from hetu_fx.plans.plan import Plan
from hetu_fx.report.run_log import Entry
from hetu_fx.report.summary import entry_text, steps_of, summary_text

_COLOURS = ("#3f51b5", "#e67e22", "#2e8b57", "#b03a6f", "#7d6608", "#117a8b")
_WIDTH, _HEIGHT = 900, 220
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:0 auto;padding:1rem;color:#222;background:#fff}
pre{overflow-x:auto;background:#f4f4f6;padding:.7rem;border-radius:4px;font-size:13px}
svg{width:100%;height:auto;background:#fafafa;border:1px solid #ddd}
.bar{background:#3f51b5;height:.8rem;border-radius:2px}
table{border-collapse:collapse;width:100%}td{padding:.15rem .6rem .15rem 0;white-space:nowrap}td:last-child{width:100%}
"""


def html_page(log: Sequence[Entry], title: str) -> str:
    """Return the page of a log that `read_log` has read."""
    sections = "\n".join(f"<h2>{name}</h2>\n{body}" for name, body in _sections(log) if body)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    name = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>{name}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n<p>{escape(entry_text(log[0]))}</p>\n{sections}\n</body></html>\n"
    )


def _sections(log: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    steps = steps_of(log)
    yield "Variants, and what changed", f"<pre>{escape(summary_text(log))}</pre>"
    yield "Seconds of each step", _chart(steps)
    yield "Compute of each process, median of a step", _devices(steps)
    for entry in log:
        if entry["event"] == "plan":
            told = Plan.from_json(entry["plan"]).explain()
            yield f"Plan {escape(repr(entry['name']))}: devices, memory, communication", f"<pre>{escape(told)}</pre>"


def _chart(steps: Sequence[Entry]) -> str:
    """Return a picture of the seconds of steps, a colour for each variant; the predicted ones are lines."""
    if not steps:
        return ""
    variants = list(dict.fromkeys(entry["variant"] for entry in steps))
    top = max(entry["seconds"] for entry in steps) or 1.0
    wide = _WIDTH / len(steps)
    boxes = [_step_box(number, entry, variants, top, wide) for number, entry in enumerate(steps)]
    legend = ", ".join(f'<b style="color:{_colour(index)}">{escape(name)}</b>' for index, name in enumerate(variants))
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(boxes)}</svg>'
    return f"<p>{legend}; the highest is {top:.3g} s; black lines: predicted</p>\n{picture}"


def _step_box(number: int, entry: Entry, variants: Sequence[str], top: float, wide: float) -> str:
    high = entry["seconds"] / top * _HEIGHT
    x, colour = number * wide, _colour(variants.index(entry["variant"]))
    box = (
        f'<rect x="{x:.2f}" y="{_HEIGHT - high:.2f}" width="{max(wide * 0.9, 0.5):.2f}" height="{high:.2f}" '
        f'fill="{colour}"><title>{escape(entry_text(entry))}</title></rect>'
    )
    predicted = entry["predicted_seconds"]
    if predicted is None or predicted > top:
        return box
    y = _HEIGHT - predicted / top * _HEIGHT
    return f'{box}<line x1="{x:.2f}" x2="{x + wide:.2f}" y1="{y:.2f}" y2="{y:.2f}" stroke="black"/>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _devices(steps: Sequence[Entry]) -> str:
    """Return bars of what each process has computed."""
    count = max((len(entry["compute_seconds"]) for entry in steps), default=0)
    told = [entry["compute_seconds"] for entry in steps if len(entry["compute_seconds"]) == count]
    medians = [median(seconds[rank] for seconds in told) for rank in range(count)]
    top = max(medians, default=0.0) or 1.0
    rows = [
        f'<tr><td>process {rank}</td><td>{seconds:.3g} s</td><td><div class="bar" style="width:{seconds / top:.1%}">'
        "</div></td></tr>"
        for rank, seconds in enumerate(medians)
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""
