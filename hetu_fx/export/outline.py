"""The outline of a graph: runs of ops by the module that they are of, repeated blocks told once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

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
class Box:
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
class Group:
    """Boxes that stand in a repeated block, and how many blocks in a row are alike; no title: in none."""

    title: str
    kind: str
    boxes: tuple[Box, ...]
    count: int = 1


def outline(graph: fx.Graph, block_paths: Sequence[str], parameters: Mapping[fx.Node, str]) -> list[Group]:
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
) -> Iterator[Group]:
    for block, run in groupby(nodes, lambda node: block_index(meta.module_stack(node), paths)):
        of_block = list(run)
        path = "" if block is None else paths[block]
        kind = "" if block is None else dict(meta.module_stack(of_block[0]))[path]
        yield Group(path, kind, tuple(_boxes(of_block, path, parameters, depth)))


def _boxes(nodes: Iterable[fx.Node], block: str, parameters: Mapping[fx.Node, str], depth: int) -> Iterator[Box]:
    for (name, kind), run in groupby(nodes, lambda node: _place(node, block, depth)):
        ops: dict[str, None] = {}
        reads: dict[str, None] = {}
        for node in run:
            ops |= {} if _op(node) in _UNTOLD else {_op(node): None}
            reads |= {_inside(parameters[read], block): None for read in node.all_input_nodes if read in parameters}
        told = (*list(ops)[:_MOST_OPS], *(("...",) if len(ops) > _MOST_OPS else ()))
        if ops or reads:
            yield Box(name, kind, told, tuple(reads))


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


def _merged(groups: Iterable[Group]) -> Iterator[Group]:
    """Yield the groups, those that are alike and follow each other as one."""
    last: Group | None = None
    for group in groups:
        if last is not None and group.title and (group.kind, group.boxes) == (last.kind, last.boxes):
            last = replace(last, count=last.count + 1)
            continue
        if last is not None and last.boxes:
            yield last
        last = group
    if last is not None and last.boxes:
        yield last
