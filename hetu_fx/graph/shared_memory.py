"""Refuse what is true of one layout in memory only: a write to a value that another shares or has copied, by strides.

`flatten`, `reshape`, `contiguous` and their like give a view where strides allow it, else a copy. A write after one
changes both values, or one of them. Strides are those of the batch and of the parameters, so a trace sees one case of
several: where the rest of a program would see the difference, the program is run on fake tensors of other layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from hetu_fx.base.torch_private import FakeTensorMode, OpOverload
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import evaluate_op, is_view, viewed_argument, written_arguments
from hetu_fx.graph.edit import ancestors

Layout = tuple[Sequence[int], int]
"""The order of dims in memory, outermost first, and by how much the innermost one's stride is larger than 1."""

DIMS = 5
"""Orders of so many dims are tried; of those with fewer as many as these leave over."""


def check_layouts(graph: fx.Graph) -> None:
    """Raise `CaptureError` if the values of a flat graph depend on how its inputs lie in memory.

    Only graphs whose writes have not been rewritten yet say so.
    """
    asked = list(_seen_writes(graph))
    # What leads to them is mostly little, and alike in all layouts; where it is not, the whole must run in a layout.
    needed = ancestors(asked)
    if not _unlike(asked, [node for node in graph.nodes if node in needed]):
        return
    for node in _unlike(asked, list(graph.nodes)):
        raise CaptureError(
            f"{node.target} at {meta.source_line(node)} gives a view of a value or a copy of it, by how the batch "
            "and the parameters lie in memory, and one of the two is written to later\n"
            "hint: take a copy (`.clone()`) before the write, or write out of place"
        )


def _unlike(asked: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the ops that share memory in some layouts in which all nodes run, and in others not, or that never run."""
    cases = _cases(nodes) if asked else ()
    found = [shared for case in cases if (shared := _shared(nodes, asked, *case)) is not None]
    return [node for node in asked if len({node in shared for shared in found}) != 1]


def _seen_writes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the ops that may give a view or a copy, if a later write to one of the two may be read from the other."""
    owners = {node: owner for node in graph.nodes if (owner := _may_share(node)) is not None}
    families: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        families.setdefault(_root(node, owners), []).append(node)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for family in families.values():
        uses = _Uses.of(family, places)
        if any(uses.writes.values()):
            open_ops = [node for node in family if node in owners and not written_arguments(node) and _is_open(node)]
            yield from (node for node in open_ops if uses.cross(node, _inside(node, family, owners)))


@dataclass(frozen=True, eq=False)
class _Uses:
    """When values that share memory, or may, are written to and when last read.

    Attributes:
        writes: the places of writes into each, in order.
        reads: the place of the last read of each, -1 for none; views of one are no reads of it.
    """

    places: Mapping[fx.Node, int]
    writes: Mapping[fx.Node, Sequence[int]]
    reads: Mapping[fx.Node, int]

    @classmethod
    def of(cls, family: Sequence[fx.Node], places: Mapping[fx.Node, int]) -> _Uses:
        """Find them."""
        own = set(family)
        writes = {node: sorted(places[user] for user in node.users if node in written_arguments(user)) for node in own}
        reading = {node: [user for user in node.users if user not in own or written_arguments(user)] for node in own}
        last = {node: max((places[user] for user in users), default=-1) for node, users in reading.items()}
        return cls(places, writes, last)

    def cross(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Tell whether a write after a node, to what comes of it, is read from the others later, or the reverse."""
        first, last = {True: math.inf, False: math.inf}, {True: -1, False: -1}
        for member, places in self.writes.items():
            side = member in inside
            first[side] = min(first[side], next((place for place in places if place > self.places[node]), math.inf))
            last[side] = max(last[side], self.reads[member])
        return first[True] < last[False] or first[False] < last[True]


def _inside(node: fx.Node, family: Sequence[fx.Node], owners: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return what shares the memory of a node, or may, and what shares that of these; `family` is in order."""
    found = {node}
    for member in family:
        if owners.get(member) in found:
            found.add(member)
    return found


def _may_share(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory a value shares, or may share in another layout."""
    known = viewed_argument(node)
    return node.all_input_nodes[0] if known is None and _is_open(node) else known


def _is_open(node: fx.Node) -> bool:
    """Tell whether an op may give a view of its argument, by its schema; what indexes always gives one."""
    is_op = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_op and meta.is_tensor(node) and bool(node.all_input_nodes) and is_view(node)


def _root(node: fx.Node, owners: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in owners:
        node = owners[node]
    return node


def _cases(nodes: Sequence[fx.Node]) -> Iterator[tuple[Layout, Mapping[sympy.Symbol, int]]]:
    """Yield layouts, with sizes of one, to try: the usual one with the example's sizes first."""
    usual = range(DIMS)
    yield (usual, 1), {}
    yield (usual, 2), {}
    for first, second in itertools.combinations(usual, 2):
        order = list(usual)
        order[first], order[second] = second, first
        yield (order, 1), {}
    for start in usual[2:]:  # channels last, time first
        yield ([0, *usual[start:], *usual[1:start]], 1), {}
        yield ([*usual[start:], *usual[:start]], 1), {}
    leaves = [node for node in nodes if node.op == "placeholder" and meta.is_tensor(node)]
    sizes = [size for node in leaves for size in meta.shape(node) if meta.is_symbolic(size)]
    for symbol in dict.fromkeys(symbol for size in sizes for symbol in meta.expression(size).free_symbols):
        yield (usual, 1), {symbol: 1}


def _shared(
    nodes: Sequence[fx.Node], asked: Collection[fx.Node], layout: Layout, sizes: Mapping[sympy.Symbol, int]
) -> set[fx.Node] | None:
    """Return which ops share their argument's memory in a layout; None where nodes do not run in it."""
    made: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            for node in nodes:
                if node.op != "output":
                    made[node] = _laid_out(node, layout, sizes) if node.op == "placeholder" else evaluate_op(node, made)
        except Exception:  # of sizes or strides that an op refuses, or of values that no fake tensor has
            return None
    return {
        node
        for node in asked
        if meta.example_storages(made[node]) & meta.example_storages(made[node.all_input_nodes[0]])
    }


def _laid_out(node: fx.Node, layout: Layout, sizes: Mapping[sympy.Symbol, int]) -> Any:
    value = meta.value(node)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [meta.evaluate_size(sizes, size) for size in value.shape]
    order, innermost = layout
    strides, stride = [0] * len(shape), innermost
    for dim in reversed([dim for dim in order if dim < len(shape)] + list(range(DIMS, len(shape)))):
        strides[dim], stride = stride, stride * max(shape[dim], 1)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of tensors that have memory in common, by their first and last byte, in alphabetic order."""
    places = [(_bytes_of(tensor), name) for name, tensor in tensors.items() if not tensor.is_meta and tensor.numel()]
    before: list[tuple[str, int, str]] = []
    for (device, begin, end), name in sorted(places):
        before = [one for one in before if one[0] == device and one[1] > begin]
        yield from ((min(other, name), max(other, name)) for *_, other in before)
        before.append((device, end, name))


def _bytes_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
