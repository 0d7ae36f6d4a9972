"""What pages and pictures in notebooks are made of: tables, keys, bars and notes, and their style."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

COLOURS = ("#4a7fd0", "#e08a2e", "#3f9d63", "#c2588f", "#9a8420", "#4aa3b5")
"""Told apart, on light and on dark."""

CLASS = "hetu-fx"
"""Of the element around them; nothing of the style holds outside of it, so that it may stand in a page of others."""

STYLE = """
.hetu-fx{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--soft:#f3f4f6;--line:#d5d9de;--quiet:#57606a;
--link:#1f5fbf;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){
.hetu-fx{--ink:#e4e6ea;--paper:#16181c;--soft:#23262c;--line:#3d434b;--quiet:#a2abb5;--link:#8ab4f8}}
.hetu-fx *{box-sizing:border-box}
.hetu-fx .scroll{overflow:auto;max-height:32rem;border:1px solid var(--line);border-radius:4px;margin:.5rem 0}
.hetu-fx table{border-collapse:collapse;font-size:.9rem;width:100%;margin:0;overflow-wrap:normal}
.hetu-fx th,.hetu-fx td{padding:.25rem .55rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);
background:var(--paper);color:var(--ink)}
.hetu-fx th:first-child,.hetu-fx td:first-child{text-align:left;position:sticky;left:0}
.hetu-fx th{background:var(--soft);position:sticky;top:0}.hetu-fx th:first-child{z-index:1}
.hetu-fx .note{color:var(--quiet);font-size:.9rem;margin:.3rem 0}
.hetu-fx .key{display:inline-block;margin-right:1rem}
.hetu-fx .key i,.hetu-fx .bar i{display:inline-block;height:.8em;border-radius:2px}
.hetu-fx .key i{width:.8em;margin-right:.35em}.hetu-fx .key.line i{width:1.4em;height:2px;vertical-align:middle}
.hetu-fx .bar{display:flex;width:7rem;height:.8rem;border-left:1px solid var(--line);margin-left:auto}
.hetu-fx .bar i{border-radius:0}.hetu-fx .short .bar{width:4rem}
@media (max-width:40rem){.hetu-fx th,.hetu-fx td{padding:.25rem .45rem}
.hetu-fx td:first-child{white-space:normal;min-width:5.5rem;max-width:9rem}}
.hetu-fx svg{display:block;width:100%;background:var(--soft)}.hetu-fx svg *{vector-effect:non-scaling-stroke}
.hetu-fx .lanes{overflow-y:auto;max-height:38rem;margin:.5rem 0}
.hetu-fx .lane{display:grid;grid-template-columns:6.5rem 1fr;align-items:center;font-size:.85rem}
.hetu-fx .lane svg{height:1.5rem}.hetu-fx .lane.more svg{height:.8rem}
.hetu-fx .lane.more{color:var(--quiet);margin-bottom:.3rem}
"""

_PAGE_STYLE = """
:root{color-scheme:light dark}
body{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--link)}nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}
pre{overflow:auto;max-height:32rem;background:var(--soft);padding:.7rem;border-radius:4px;font-size:.85rem;
overflow-wrap:normal}
.plot svg{height:200px}.axis{display:flex;justify-content:space-between;font-size:.85rem;color:var(--quiet)}
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are text; what is wider or higher than there is room scrolls by itself."""
    return cells_table(header, [[escape(cell) for cell in row] for row in rows])


def cells_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML; the header is text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def keys(colours: Mapping[str, str], lines: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return what the colours of a picture's areas, and of its lines, mean, by name."""
    marks = [_key(name, colour, "key") for name, colour in colours.items()]
    return f"<p>{''.join([*marks, *(_key(name, colour, 'key line') for name, colour in lines.items())])}</p>"


def _key(name: str, colour: str, kind: str) -> str:
    return f'<span class="{kind}"><i style="background:{colour}"></i>{escape(name)}</span>'


def bar(parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """Return a bar of (name, value, colour) one behind the other, as long as the cell where they add up to `whole`."""
    pieces = (
        f'<i style="width:{min(1.0, value / whole):.2%};background:{colour}" title="{escape(name)}"></i>'
        for name, value, colour in parts
        if value and whole
    )
    return f'<div class="bar">{"".join(pieces)}</div>'


def note(text: str) -> str:
    """Return a remark, in small print."""
    return f'<p class="note">{escape(text)}</p>'


def number(value: float | None, scale: float = 1.0) -> str:
    """Return a number over `scale` with three digits, and none that stands before the point cut off; "" for none."""
    if value is None:
        return ""
    shown = value / scale
    return f"{shown:.3g}" if abs(shown) < 1000 else f"{shown:,.0f}"


def alone(parts: str) -> str:
    """Return parts with their style, as what can stand in any page."""
    return f'<div class="{CLASS}" style="padding:.5rem"><style>{STYLE}</style>{parts}</div>'


def page(title: str, body: str) -> str:
    """Return a whole page that needs nothing from elsewhere, `body` below its title."""
    name = escape(title)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"{meta}<title>{name}</title><style>{STYLE}{_PAGE_STYLE}</style>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n'
        f'<body class="{CLASS}"><h1>{name}</h1>\n{body}\n</body></html>\n'
    )
