"""Draw a graph as an SVG: a column of boxes from inputs to results, repeated blocks drawn once.

What is drawn is its outline: runs of ops by the module that they are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from torch import fx

from hetu_fx.export.runnable import Runnable, StateSlot, open_sizes
from hetu_fx.graph import meta
from hetu_fx.graph.blocks import ModuleStack, block_index

MOST_BOXES = 60  # outside of blocks: of a graph that has more, modules are told at a lesser depth
OURS = "hetu"
_UNTOLD = frozenset(
    "getitem sym_size detach alias view reshape expand slice unsqueeze to transpose permute contiguous t".split()
)
"""Ops that only look at values in another way."""
_MOST_OPS = 4


@dataclass(frozen=True)
class PictureBox:
    """A run of ops of one module, or a communication.

    Attributes:
        name: of the module, inside its block; or of the communication.
        kind: class of the module; "communication".
        ops: what is computed, each once.
        reads: names and local shapes of the parameters that are read.
    """

    name: str
    kind: str
    ops: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class PictureGroup:
    """Boxes that stand in a repeated block, and how many blocks in a row are alike; no title: in none."""

    title: str
    kind: str
    boxes: tuple[PictureBox, ...]
    count: int = 1


def outline(graph: fx.Graph, block_paths: Sequence[str], parameters: Mapping[fx.Node, str]) -> list[PictureGroup]:
    """Return the graph as boxes, in order.

    Args:
        graph: ops know their modules.
        block_paths: names of the repeated blocks.
        parameters: what to call the placeholders that are parameters: name and shape.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and _op(node) != "getitem"]
    for depth in range(12, 0, -1):
        groups = list(_merged(_groups(nodes, block_paths, parameters, depth)))
        if sum(len(group.boxes) for group in groups) <= MOST_BOXES:
            break
    return groups


def _groups(
    nodes: Iterable[fx.Node], paths: Sequence[str], parameters: Mapping[fx.Node, str], depth: int
) -> Iterator[PictureGroup]:
    for block, run in groupby(nodes, lambda node: block_index(meta.module_stack(node), paths)):
        of_block = list(run)
        path = "" if block is None else paths[block]
        kind = "" if block is None else dict(meta.module_stack(of_block[0]))[path]
        yield PictureGroup(path, kind, tuple(_boxes(of_block, path, parameters, depth)))


def _boxes(nodes: Iterable[fx.Node], block: str, parameters: Mapping[fx.Node, str], depth: int) -> Iterator[PictureBox]:
    for (name, kind), run in groupby(nodes, lambda node: _place(node, block, depth)):
        ops: dict[str, None] = {}
        reads: dict[str, None] = {}
        for node in run:
            ops |= {} if _op(node) in _UNTOLD else {_op(node): None}
            reads |= {_inside(parameters[read], block): None for read in node.all_input_nodes if read in parameters}
        told = (*list(ops)[:_MOST_OPS], *(("...",) if len(ops) > _MOST_OPS else ()))
        if ops or reads:
            yield PictureBox(name, kind, told, tuple(reads))


def _place(node: fx.Node, block: str, depth: int) -> tuple[str, str]:
    """Return the module that an op is of, inside its block, and its class; what communicates stands alone."""
    if _is_ours(node):
        return _op(node), "communication"
    stack: ModuleStack = meta.module_stack(node)[:depth]
    path, kind = stack[-1] if stack else ("", "")
    return _inside(path, block), kind


def _inside(path: str, block: str) -> str:
    """Return a module's name, inside its block where it is in one; empty for the block itself."""
    return "" if path == block else path.removeprefix(f"{block}.") if block else path


def _is_ours(node: fx.Node) -> bool:
    name = str(node.target)
    return name.startswith(f"{OURS}.") and not name.startswith((f"{OURS}.dropout", f"{OURS}.uniform"))


def _op(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return name.removeprefix("aten::")


def _merged(groups: Iterable[PictureGroup]) -> Iterator[PictureGroup]:
    """Yield the groups, those that are alike and follow each other as one."""
    last: PictureGroup | None = None
    for group in groups:
        if last is not None and group.title and (group.kind, group.boxes) == (last.kind, last.boxes):
            last = replace(last, count=last.count + 1)
            continue
        if last is not None and last.boxes:
            yield last
        last = group
    if last is not None and last.boxes:
        yield last


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
        if isinstance(place, StateSlot) and place.is_parameter
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


def _draw_group(canvas: _Canvas, group: PictureGroup) -> None:
    top = canvas.y
    if group.title:
        canvas.y += LINE + 10
    for box in group.boxes:
        canvas.box(_lines(box), FILLS.get(box.kind, FILLS[""]), 12 if group.title else 0)
    if group.title:
        several = f"{group.count} x {group.kind}, the first of them {group.title}"
        canvas.frame(several if group.count > 1 else f"{group.kind}: {group.title}", top)
        canvas.y += GAP // 2


def _lines(box: PictureBox) -> list[str]:
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
