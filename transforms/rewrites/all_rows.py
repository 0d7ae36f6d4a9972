"""Let what compares rows with each other have the rows of all replicas: contrastive losses, distances, same labels.

A value with a row for each pair of rows cannot be cut by rows. So what it is made of is gathered: each replica places
its rows among zeros, and the sum over replicas, which deduction puts there as wherever summands are read whole, is the
batch. From there on all replicas compute the same, which is little beside the encoders that make the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, is_random
from hetu_fx.graph.edit import SIZE_OPS, Rewrite, add_leaf, cast, insert, replace
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind, drop_dead_nodes
from hetu_fx.transforms.rewrites import row_ops  # noqa: F401 - registers hetu::place_rows and hetu::own_rows
from hetu_fx.transforms.rewrites.counter_rng import STATE
from hetu_fx.transforms.rewrites.counts import CountingRewrite

aten = torch.ops.aten
PLACE, OWN = torch.ops.hetu.place_rows.default, torch.ops.hetu.own_rows.default

Layout = tuple[int, int]
"""What stands before and after the rows in a dim: (outer, inner)."""


@dataclass(frozen=True)
class AllRows:
    """Gather the rows of all replicas for values that have a row for each pair of rows.

    Requires: a captured graph. One with a static batch, or without such values, is left as it is.
    Ensures: no value has the rows of the batch in two dims. Those that had, and all that is made of them, have the rows
        of the whole batch, whose number is the graph's `all_rows`; outputs among them that begin with rows have a
        replica's own there. Where it is not known how the rows of a value stand in its dim, a note says so, and the
        graph is as it was.

        %scores = matmul(%a, %b_t)    ->    %all_a = hetu.place_rows(%a, %random_state, %rows, 0, 1, 1)
                                            %all_b_t = hetu.place_rows(%b_t, %random_state, %rows, 1, 1, 1)
                                            %scores = matmul(%all_a, %all_b_t)
    """

    name: ClassVar[str] = "all_rows"

    def __call__(self, graph: Graph) -> Graph:
        if not any(_is_paired(node, graph) for node in graph.graph.nodes):
            return graph
        try:
            return _Gathering(_JoinedApart(graph).run()).run()
        except _UnknownLayout as error:
            return graph.with_note(str(error))


class _UnknownLayout(Exception):
    """It is not known where in a dim the rows stand; caught by the pass."""


def _is_paired(node: fx.Node, graph: Graph) -> bool:
    """Tell whether a value has rows in two dims, or pairs of them in one."""
    if node.op != "call_function" or not meta.is_tensor(node) or graph.batch_symbol is None:
        return False
    having = [meta.expression(size) for size in meta.shape(node) if meta.depends_on_batch(size, graph)]
    squares = (power.base for size in having for power in size.atoms(sympy.Pow))
    return len(having) > 1 or graph.batch_symbol in squares


class _JoinedApart(Rewrite):
    """Rewrites joins of batches along their rows: stacked, their rows stay beside their own."""

    def visit(self, node: fx.Node) -> None:
        """Stack what is joined along its rows, and flatten."""
        if node.target is not aten.cat.default:
            return
        parts, dim = argument(node, "tensors"), int(argument(node, "dim")) % len(meta.shape(node))
        if all(meta.expression(meta.shape(part)[dim]) == self.graph.batch_symbol for part in parts):
            stacked = insert(node, aten.stack.default, parts, dim)
            replace(node, insert(node, aten.flatten.using_ints, stacked, dim, dim + 1))


class _Gathering(CountingRewrite):
    """Rewrites what is made of pairs of rows, and brings it the rows that it reads.

    Attributes:
        together: the values that are made of pairs of rows, themselves among them.
        total: how many rows all replicas have, as an example.
        whole: what has been gathered so far, by what a replica has of it.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.given = dict(zip(self.graph.graph.nodes, graph.graph.nodes, strict=True))
        self.together: set[fx.Node] = set()
        self.total = meta.fresh_size(self.graph.graph, "all_rows", self.graph.batch_symbol)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.factors = analyse(graph)
        self._total: fx.Node | None = None

    def run(self) -> Graph:
        """Return the graph rewritten."""
        for node in list(self.graph.graph.nodes):
            starts = _is_paired(node, self.graph) or self._needs_all(node)
            if starts or not self.together.isdisjoint(node.all_input_nodes):
                self.together.add(node)
        for node in list(self.graph.graph.nodes):
            if node in self.together and node.op == "call_function":
                self.visit(node)
        self._cut_outputs()
        drop_dead_nodes(self.graph.graph)
        return self.graph.evolve(all_rows=meta.expression(self.total))

    def _needs_all(self, node: fx.Node) -> bool:
        """Tell whether an op cannot be cut by the rows that it reads, as one that takes some of them."""
        given = self.given[node]
        if not self.factors.is_op(given) or self._is_of_sizes(node):
            return False
        op = self.factors.op(given)
        return any(cls.is_batch and cls in op.whole for operand in op.read for cls in operand.classes)

    def visit(self, node: fx.Node) -> None:
        """Let a node read the rows of all replicas."""
        for source in node.all_input_nodes:
            if source not in self.together and meta.depends_on_batch(source, self.graph):
                node.replace_input_with(source, self._of_all(source, node))
        meta.infer(node)

    def _of_all(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Return what a value is on the rows of all replicas, made before `here`."""
        if value not in self.whole:
            if value.target is aten.sym_size.int:
                made = self._size(meta.expression(meta.value(value)), here)
            elif self._is_of_sizes(value):
                made = self._again(value, here)
            else:
                made = self._placed(value, here)
            self.whole[value] = made
        return self.whole[value]

    def _is_of_sizes(self, value: fx.Node) -> bool:
        """Tell whether a value is made of sizes alone, as a range of as many numbers as there are rows."""
        if value.op != "call_function" or is_random(value):
            return False
        return value.target is aten.sym_size.int or all(map(self._is_of_sizes, value.all_input_nodes))

    def _again(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Make a value again, of the sizes that all replicas' rows have."""

        def source(argument: fx.Node) -> fx.Node:
            return self._of_all(argument, here) if meta.depends_on_batch(argument, self.graph) else argument

        args, kwargs = fx.node.map_arg((value.args, value.kwargs), source)
        with here.graph.inserting_before(here):
            made = here.graph.call_function(value.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]
        meta.copy_meta(value, made)
        meta.infer(made)
        return made

    def _size(self, expression: Any, here: fx.Node) -> fx.Node:
        """Return a size with as many rows as all replicas have."""
        if expression == self.graph.batch_symbol:
            return self._total_size(here)
        operation = SIZE_OPS.get(type(expression))
        if operation is None:
            raise _UnknownLayout(f"it is not known what the size {expression} is for the rows of all replicas")
        rows = self.graph.batch_symbol
        first, *rest = sorted(expression.args, key=lambda part: rows not in part.free_symbols)
        made = self._size(first, here)
        for part in rest:
            other = self._size(part, here) if rows in part.free_symbols else self.sizes.of_expression(part)
            made = insert(here, operation, made, other)
        return made

    def _total_size(self, here: fx.Node) -> fx.Node:
        """Return the number of all rows, which is a count as a size."""
        if self._total is None:
            count = self.rows()
            with here.graph.inserting_before(here):
                self._total = here.graph.call_function(aten._local_scalar_dense.default, (count,))
            meta.copy_meta(here, self._total)
            meta.set_value(self._total, self.total)
        return self._total

    def _placed(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Gather a value: booleans as numbers, which can be summed."""
        if not meta.is_tensor(value):
            raise _UnknownLayout(f"'{value.name}' ({meta.source_line(value)}) is a number that depends on the rows")
        dim = next(i for i, size in enumerate(meta.shape(value)) if meta.depends_on_batch(size, self.graph))
        kind = meta.dtype(value)
        summable = cast(here, value, torch.uint8) if kind is torch.bool else value
        place = self._state(), self._total_size(here), dim, *self._layout(value, dim)
        return cast(here, insert(here, PLACE, summable, *place), kind)

    def _layout(self, value: fx.Node, dim: int) -> Layout:
        """Return what stands before and after the rows in a dim of a given value."""
        if meta.expression(meta.shape(value)[dim]) == self.graph.batch_symbol:
            return 1, 1
        classes = self.factors.dims(self.given[value])[dim] if value in self.given else ()
        at = next((i for i, cls in enumerate(classes) if cls.is_batch), None)
        sizes = [cls.size for i, cls in enumerate(classes) if i != at]
        if at is None or None in sizes:
            raise _UnknownLayout(
                f"rows meet each other at {meta.source_line(value)}, and how they stand in dim {dim} of "
                f"'{value.name}' is not known; it is exact with one pipeline and one micro-batch only"
            )
        known = [size for size in sizes if size is not None]
        return math.prod(known[:at]), math.prod(known[at:])

    def _state(self) -> fx.Node:
        known = self.graph.leaves_of(LeafKind.RANDOM_STATE)
        if known:
            return known[0].node
        self.graph, node = add_leaf(self.graph, LeafKind.RANDOM_STATE, STATE, (3,), torch.int64)
        return node

    def _cut_outputs(self) -> None:
        """Give each replica its own rows of outputs that begin with rows."""
        values, here = list(self.graph.output_values), self.graph.output_node
        for i, (leaf, node) in enumerate(zip(self.graph.outputs, values, strict=True)):
            if leaf.kind is OutputKind.VALUE and node in self.together and meta.is_tensor(node):
                sizes = [meta.expression(size) for size in meta.shape(node)]
                if sizes and sizes[0] == meta.expression(self.total):
                    rows = self.sizes.of_expression(self.graph.batch_symbol)
                    values[i] = insert(here, OWN, node, self._state(), rows, 0, 1, 1)
        here.args = (tuple(values),)
