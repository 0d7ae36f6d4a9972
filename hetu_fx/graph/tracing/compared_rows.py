"""Forwards that compare the number of rows: a trace holds for the numbers for which that comes out alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram

from hetu_fx.base.torch_private import forget_guard, size_guards
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.example import Example
from hetu_fx.graph.leaves.leaf_ops import LEAF, told_arguments

aten = torch.ops.aten

_OF_SIZES = frozenset({aten._assert_scalar.default, aten.sym_constrain_range_for_size.default})
_SAME_WHERE_SHAPES_ARE = frozenset({
    aten.slice.Tensor, aten.expand.default, aten.view.default, aten.reshape.default, aten.contiguous.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.narrow.default, aten.alias.default,
})  # fmt: skip
_MOST = 4096
"""Rows up to which a number is looked for that a comparison tells from the others."""


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """What a trace has found out of the number of rows.

    Attributes:
        exported: the trace.
        symbol: of the number.
        conditions: that it has gone on by; some may be of other sizes, too.
    """

    exported: ExportedProgram
    symbol: sympy.Symbol
    conditions: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, exported: ExportedProgram, example: Example) -> ComparedRows:
        """Find the conditions of a trace that was made with this example.

        Raises:
            CaptureError: the trace has fixed the number of rows.
        """
        nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(example.tensors) :]
        shapes = dict(zip(example.tensors, map(meta.shape, nodes), strict=True))
        sizes = {meta.expression(shapes[name][dim]) for name, dim in example.row_dims.items()}
        symbol = sizes.pop() if len(sizes) == 1 else None
        if not isinstance(symbol, sympy.Symbol):
            raise CaptureError("the number of rows is fixed")
        found = dict.fromkeys(size_guards(meta.fake_mode(exported.graph)))
        return cls(exported, symbol, tuple(one for one in found if symbol in one.free_symbols))

    def takes(self, rows: int) -> bool:
        """Tell whether the trace holds for so many rows, as far as they alone tell."""
        return all(one.subs(self.symbol, rows) is not sympy.false for one in self.conditions)

    @property
    def others(self) -> int | None:
        """Return a number of rows on the other side of the one thing that is asked of them; None where it is not one.

        The least, but for the first two, which a trace takes for others than the rest.
        """
        if len(self.conditions) != 1 or self.conditions[0].free_symbols != {self.symbol}:
            return None
        numbers = range(3, _MOST)
        return next((rows for rows in numbers if not self.takes(rows)), None)

    def matches_trace(self, other: ComparedRows) -> bool:
        """Tell whether this is the trace of another number of rows, too, for which the one condition does not hold."""
        opposite = [sympy.Not(one) for one in other.conditions]
        return list(self.conditions) == opposite and _told(self.exported) == _told(other.exported)

    def is_same_for_one(self, of_one: ExportedProgram) -> bool:
        """Tell whether a trace of one row has come out alike: nothing was squeezed, or asked, for its sake."""
        return _told_for_one(self.exported, self.symbol) == _told_for_one(of_one, self.symbol)

    def forget(self) -> None:
        """Let the trace hold for all numbers of rows."""
        for condition in self.conditions:
            forget_guard(meta.fake_mode(self.exported.graph), condition, self.symbol)


def _told(exported: ExportedProgram) -> list[Any]:
    """Return what a trace consists of, its constants included."""
    told = [(n.op, str(n.target), str(n.args), str(n.kwargs), _told_value(n)) for n in _nodes(exported)]
    return [told, _constants(exported)]


def _nodes(exported: ExportedProgram) -> Iterator[fx.Node]:
    """Yield the nodes of a trace and of the regions in it, but torch's own call that checks sizes."""
    graphs = (one.graph for one in exported.graph_module.modules() if isinstance(one, fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes if node.op != "call_module")


def _constants(exported: ExportedProgram) -> str:
    return repr({name: value.tolist() for name, value in exported.constants.items() if isinstance(value, torch.Tensor)})


def _told_for_one(exported: ExportedProgram, rows: sympy.Symbol) -> list[Any]:
    """Return what a trace makes of one row: its tensors in order, each with what it is made of."""
    numbers: dict[fx.Node, int] = {}

    def of_one(size: Any) -> Any:
        return meta.expression(size).subs(rows, 1) if meta.is_symbolic(size) else size

    def form_of(node: fx.Node) -> Any:
        made = node.meta.get("val")
        return (made.dtype, [of_one(size) for size in made.shape]) if isinstance(made, torch.Tensor) else ""

    def read(argument: fx.Node) -> Any:
        made = argument.meta.get("val")
        return of_one(made) if isinstance(made, meta.SYMBOLIC) else f"%{numbers.get(argument, argument.name)}"

    told: list[Any] = [_constants(exported)]
    for node in _nodes(exported):
        if isinstance(node.meta.get("val"), meta.SYMBOLIC) or node.target in _OF_SIZES:
            continue
        form = form_of(node)
        source = node.args[0] if node.target in _SAME_WHERE_SHAPES_ARE else None
        if isinstance(source, fx.Node) and form_of(source) == form:
            numbers[node] = numbers[source]
            continue
        numbers[node] = len(told)
        told.append(str((node.op, node.target, fx.node.map_arg(_arguments(node), read), form)))
    return told


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    """Return an op's arguments, but what a leaf says of its results in other sizes, whose own are told."""
    args, kwargs = told_arguments(node)
    return (args[:-1] if node.target is LEAF else args), kwargs


def _told_value(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)
