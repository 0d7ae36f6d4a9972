"""Small steps that passes are made of: insert an op, add a leaf or an output, find what a value is made of.

The fx graph is changed in place, so work on a clone; leaves and outputs come back in a new `Graph`. An op that is
inserted takes its example value from a call like it where there is one: the blocks of a model repeat what they do.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from hetu_fx.base.torch_private import FloorDiv, Mod, PythonMod, tree_map
from hetu_fx.graph import meta
from hetu_fx.graph.calls import Size
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind, OutputLeaf, drop_dead_nodes

aten = torch.ops.aten


def insert(here: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert an op before `here`, with its source line, its modules and a computed example value."""
    with here.graph.inserting_before(here):
        node: fx.Node = here.graph.call_function(target, args, kwargs)
    meta.copy_meta(here, node)
    alike = alike_call(node)
    if alike is None:
        meta.infer(node)
    else:
        meta.set_value(node, meta.value(alike))
    return node


def cast(here: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Insert a cast before `here` of a value that has another dtype."""
    return value if meta.dtype(value) == dtype else insert(here, aten.to.dtype, value, dtype)


def append_size(target: Callable[..., int], first: fx.Node, second: Size) -> fx.Node:
    """Add a number that is computed from a size at the end of a graph, with its value in the example batch."""
    args = (first, second)
    node = first.graph.call_function(target, args)
    meta.set_value(node, target(*fx.node.map_arg(args, meta.value)))
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let all users of `old` use `new`, and erase `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _end_of_leaves(graph: fx.Graph) -> fx.Node:
    """Return the first node that is not a placeholder."""
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def add_leaf(
    graph: Graph, kind: LeafKind, name: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Graph, fx.Node]:
    """Add a placeholder after the others; return the new Graph and the placeholder."""
    with graph.graph.inserting_before(_end_of_leaves(graph.graph)):
        node = graph.graph.placeholder(name)
    meta.set_value(node, meta.fresh_placeholder_value(graph.graph, tuple(shape), dtype))
    leaf = Leaf(kind, name, node, persistent=False)
    return graph.evolve(leaves=(*graph.leaves, leaf)), node


def add_output(graph: Graph, kind: OutputKind, name: str, node: fx.Node) -> Graph:
    """Add a value to the outputs."""
    graph.output_node.args = ((*graph.output_values, node),)
    return graph.evolve(outputs=(*graph.outputs, OutputLeaf(name, kind)))


class Sizes:
    """Gives sizes as ints, or as nodes at the start of the graph that compute them from the inputs' sizes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph.graph
        self.symbols = _sizes_of_inputs(graph)
        self.made: dict[Any, fx.Node] = {}
        self.last: fx.Node | None = None

    def of(self, size: meta.Size) -> int | fx.Node | None:
        """Return a size of the graph; None if the inputs' sizes do not tell it."""
        return self.of_expression(meta.expression(size))

    def of_expression(self, expression: Any) -> int | fx.Node | None:
        """Return the value of a sum or product of sizes of inputs; None for what is made otherwise."""
        if isinstance(expression, int) or expression.is_Integer:
            return int(expression)
        if expression not in self.made:
            node = self._make(expression)
            if node is None:
                return None
            self.made[expression] = node
        return self.made[expression]

    def _make(self, expression: Any) -> fx.Node | None:
        if expression in self.symbols:
            return self._insert(aten.sym_size.int, *self.symbols[expression])
        target, operands = size_operation(expression)
        if target is None:
            return None
        parts = [self.of_expression(operand) for operand in operands]
        if any(part is None for part in parts):
            return None
        result = parts[0]
        for part in parts[1:]:
            result = self._insert(target, result, part)
        return result if isinstance(result, fx.Node) else None

    def _insert(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_after(self.last or self._last_leaf()):
            self.last = self.graph.call_function(target, args)
        meta.infer(self.last)
        return self.last

    def _last_leaf(self) -> fx.Node:
        placeholders: list[fx.Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        return placeholders[-1]


def size_operation(size: Any) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
    """Return what a size is made by of others, and these; a power is a product. None: of none, or unknown."""
    if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 1:
        return operator.mul, (size.base,) * int(size.exp)
    return _SIZE_OPS.get(type(size)), getattr(size, "args", ())


_SIZE_OPS: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv, Mod: operator.mod,
    PythonMod: operator.mod,
}  # fmt: skip


class Rewrite(ABC):
    """Rewrites a clone of a graph, op by op.

    Attributes:
        graph: the clone so far.
        sizes: its sizes.
        notes: what could not be rewritten, for the user.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph.clone()
        self.sizes = Sizes(self.graph)
        self.notes: list[str] = []

    @abstractmethod
    def visit(self, node: fx.Node) -> None:
        """Rewrite an op, if there is something to rewrite."""

    def run(self) -> Graph:
        """Return the graph rewritten."""
        for node in list(self.graph.graph.nodes):
            if node.op == "call_function":
                self.visit(node)
        result = self.graph.with_note(*self.notes)
        drop_dead_nodes(result.graph)
        return result


def _sizes_of_inputs(graph: Graph) -> Mapping[Any, tuple[fx.Node, int]]:
    found: dict[Any, tuple[fx.Node, int]] = {}
    for leaf in graph.leaves_of(LeafKind.INPUT):
        for dim, size in enumerate(meta.shape(leaf.node)):
            if meta.is_symbolic(size):
                found.setdefault(meta.expression(size), (leaf.node, dim))
    return found


def _inputs(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def ancestors(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = _inputs
) -> frozenset[fx.Node]:
    """Return the nodes that these are made of, themselves among them.

    `sources` gives what a node is made of; where it gives nothing the walk ends.
    """
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += sources(node)
    return frozenset(found)


def descendants(
    graph: Graph, start: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node]] = _inputs
) -> frozenset[fx.Node]:
    """Return the ops that are made of some of the given nodes, and those nodes; `sources` gives what one is made of."""
    reached = set(start)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(sources(node)):
            reached.add(node)
    return frozenset(reached)


def alike_call(node: fx.Node) -> fx.Node | None:
    """Return another call of the node's graph with the same op and arguments that look the same, if there is one.

    Its example value is the node's, too: it depends on how the arguments look. The exception is a size that only
    a batch's values tell: it is another one for every call, so such a call is like none.

    Args:
        node: an op node whose node arguments have example values.
    """
    looks = _looks_of_arguments(node)
    others = node.graph.find_nodes(op=node.op, target=node.target, sort=False)
    return next((other for other in others if _is_usable(other, node) and _looks_of_arguments(other) == looks), None)


def _is_usable(other: fx.Node, node: fx.Node) -> bool:
    return other is not node and meta.has_value(other) and not meta.is_data_dependent(other)


def _looks_of_arguments(node: fx.Node) -> Any:
    return tree_map(_looks, (node.args, node.kwargs))


def _looks(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return type(argument), meta.expression(argument)  # 1, 1.0 and True are equal, and make different results
    return tree_map(_looks_of_example, meta.value(argument))


def _looks_of_example(example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return type(example), meta.expression(example)
    sizes, strides = (tuple(meta.expression(size) for size in of) for of in (example.shape, example.stride()))
    return sizes, strides, example.dtype, example.device
