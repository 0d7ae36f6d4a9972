"""What sections are made of: tables, keys, bars and notes, and the style of it all.

Words are never inside pictures, which are stretched to the width of the window: so they stay as large as the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--soft:#f3f4f6;--line:#d5d9de;--quiet:#57606a;--link:#1f5fbf}
@media (prefers-color-scheme:dark){
:root{--ink:#e4e6ea;--paper:#16181c;--soft:#23262c;--line:#3d434b;--quiet:#a2abb5;--link:#8ab4f8}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:1rem;color:var(--ink);
background:var(--paper);overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--link)}nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.scroll{overflow:auto;max-height:32rem;border:1px solid var(--line);border-radius:4px;margin:.5rem 0}
table{border-collapse:collapse;font-size:.9rem;width:100%;overflow-wrap:normal}
th,td{padding:.25rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{background:var(--soft);position:sticky;top:0}
pre{overflow:auto;max-height:32rem;background:var(--soft);padding:.7rem;border-radius:4px;font-size:.85rem;
overflow-wrap:normal}
svg{display:block;width:100%;background:var(--soft)}svg *{vector-effect:non-scaling-stroke}
.note{color:var(--quiet);font-size:.9rem;margin:.3rem 0}
.key{display:inline-block;margin-right:1rem}.key i,.bar i{display:inline-block;height:.8em;border-radius:2px}
.key i{width:.8em;margin-right:.35em}
.plot svg{height:200px}.axis{display:flex;justify-content:space-between;font-size:.85rem;color:var(--quiet)}
.lanes{overflow-y:auto;max-height:38rem;margin:.5rem 0}
.lane{display:grid;grid-template-columns:6.5rem 1fr;align-items:center;font-size:.85rem}
.lane svg{height:1.5rem}.lane.more svg{height:.8rem}.lane.more{color:var(--quiet);margin-bottom:.3rem}
.bar{display:flex;width:11rem;height:.8rem;border-left:1px solid var(--line);margin-left:auto}.bar i{border-radius:0}
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are text; what is wider or higher than there is room scrolls by itself."""
    return cells_table(header, [[escape(cell) for cell in row] for row in rows])


def cells_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML; the header is text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def keys(colours: Mapping[str, str]) -> str:
    """Return what the colours of a picture mean, by name."""
    marks = (_key(name, colour) for name, colour in colours.items())
    return f"<p>{''.join(marks)}</p>"


def _key(name: str, colour: str) -> str:
    return f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'


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
