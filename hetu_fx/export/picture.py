"""Draw a graph as an SVG: a column of boxes from inputs to results, repeated blocks drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import fx

from hetu_fx.export.outline import Box, Group, outline
from hetu_fx.export.runnable import Runnable, State, open_sizes

WIDTH, MARGIN, LINE, GAP = 640, 24, 18, 14
FILLS = {"communication": "#ffe3b8", "data": "#dcecff", "": "#f4f4f4"}
_CHARACTERS = 84  # of a line of text that fits a box


class _Canvas:
    """Draws downwards: keeps what was drawn, and where the next box begins."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.y = MARGIN

    def text(self, line: str, x: int, y: int, style: str = "") -> None:
        short = line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 3]}..."
        self.drawn.append(f'<text x="{x}" y="{y}" {style}>{escape(short)}</text>')

    def box(self, lines: Sequence[str], fill: str, inset: int) -> None:
        """Draw a box with its lines, the first one bold, and the way on from it."""
        height = LINE * len(lines) + 10
        x, width = MARGIN + inset, WIDTH - 2 * (MARGIN + inset)
        self.drawn.append(
            f'<rect x="{x}" y="{self.y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="#888"/>'
        )
        for number, line in enumerate(lines):
            style = 'font-weight="bold"' if number == 0 else 'fill="#444" font-size="12"'
            self.text(line, x + 10, self.y + LINE * (number + 1), style)
        self.y += height
        middle = WIDTH // 2
        self.drawn.append(f'<path d="M{middle} {self.y} v{GAP}" stroke="#888" marker-end="url(#tip)"/>')
        self.y += GAP

    def frame(self, title: str, top: int) -> None:
        """Draw the frame of a group that began at `top`, behind its boxes."""
        self.drawn.insert(
            0,
            f'<rect x="{MARGIN // 2}" y="{top}" width="{WIDTH - MARGIN}" height="{self.y - top - GAP // 2}" rx="8" '
            f'fill="white" stroke="#2b6cb0" stroke-dasharray="5 3"/>',
        )
        self.text(title, MARGIN, top + LINE, 'fill="#2b6cb0" font-weight="bold"')


def draw(runnable: Runnable, title: str, block_paths: Sequence[str]) -> str:
    """Return the picture of a graph as SVG text."""
    canvas = _Canvas()
    canvas.text(title, MARGIN, canvas.y + 4, 'font-size="16" font-weight="bold"')
    canvas.y += LINE
    taken = [f"{arg.name} {_sizes(arg.node, arg.shape)}" for arg in runnable.arguments]
    canvas.box(["takes", *taken], FILLS["data"], 0)
    parameters = {p.node: f"{p.name} {list(p.shape)}" for p in runnable.states if p.is_parameter}
    placeholders = (node for node in runnable.graph.nodes if node.op == "placeholder")
    read = {
        node: parameters[place.node]
        for node, place in zip(placeholders, runnable.places, strict=True)
        if isinstance(place, State) and place.is_parameter
    }
    for group in outline(runnable.graph, block_paths, read):
        _draw_group(canvas, group)
    made = [f"{result.name}{' (buffer, updated)' if result.is_update else ''}" for result in runnable.results]
    canvas.box(["gives", *made], FILLS["data"], 0)
    canvas.drawn.pop()  # nothing follows
    return _svg(canvas)


def _sizes(node: fx.Node, local: Sequence[int]) -> str:
    sizes = zip(open_sizes(node), local, strict=True)
    return f"[{', '.join('?' if isinstance(size, str) else str(here) for size, here in sizes)}]"


def _draw_group(canvas: _Canvas, group: Group) -> None:
    top = canvas.y
    if group.title:
        canvas.y += LINE + 10
    for box in group.boxes:
        canvas.box(_lines(box), FILLS.get(box.kind, FILLS[""]), 12 if group.title else 0)
    if group.title:
        several = f"{group.count} x {group.kind}, the first of them {group.title}"
        canvas.frame(several if group.count > 1 else f"{group.kind}: {group.title}", top)
        canvas.y += GAP // 2


def _lines(box: Box) -> list[str]:
    if box.kind == "communication":
        return [box.name]
    name = ": ".join(filter(None, (box.name, box.kind))) or "outside of modules"
    return [name, *([", ".join(box.ops)] if box.ops else []), *box.reads]


def _svg(canvas: _Canvas) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{canvas.y}" '
        f'viewBox="0 0 {WIDTH} {canvas.y}" font-family="sans-serif" font-size="13">'
    )
    tip = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0 0 L6 3 L0 6 z" fill="#888"/></marker></defs>'
    )
    return "\n".join([head, tip, '<rect width="100%" height="100%" fill="white"/>', *canvas.drawn, "</svg>", ""])
