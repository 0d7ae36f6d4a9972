"""Let ops in which rows meet have the rows of all replicas: statistics, contrastive losses, quantiles, ranking, mining.

What such an op reads is gathered: each replica places its rows among zeros, and the sum over replicas, which deduction
puts there as wherever summands are read whole, is the batch. All replicas then compute the same, so that this is right
for every deterministic op. Each takes its own rows of what comes out, where products with parameters follow; else what
follows runs on all rows too, which is little beside the encoders that made them.

What fixes a batch (a model that reads its size in Python, an op that torch traces for one size) runs for all rows on
each replica, with the sizes that it was traced for: what one device computes, whatever the op.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.rules.call import mutable_copy, set_entry
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, is_random
from hetu_fx.graph.edit import Rewrite, ancestors, descendants, insert, replace, size_operation
from hetu_fx.graph.graph import FixedRows, Graph, Leaf, LeafKind, OutputKind, drop_dead_nodes
from hetu_fx.graph.row_dims import with_rows
from hetu_fx.transforms.rewrites.counter_rng import with_random_state
from hetu_fx.transforms.rewrites.counts import CountingRewrite
from hetu_fx.transforms.rewrites.row_ops import OWN, RowLayout, insert_row_mask

aten = torch.ops.aten


@dataclass(frozen=True)
class AllRows:
    """Gather the rows of all replicas for ops that must have them, and the number of all rows for those that read it.

    Requires: a captured graph whose means are sums over counts. One in which no rows meet is left as it is.
    Ensures: every op can be cut by rows, or reads the rows of the whole batch, whose number is the graph's `all_rows`;
        outputs that begin with rows have a replica's own there. Where it is not known how the rows of a value lie in
        its dim, a note says so, and the graph is as it was. Of a graph with a static batch, the inputs are gathered,
        and every replica runs all of it. What is gathered for which op says `planner.gathered`.

        %scores = matmul(%a, %b_t)    ->    %all_a = hetu.place_rows(%a, %random_state, %rows, 0, 1, 1)
                                            %all_b_t = hetu.place_rows(%b_t, %random_state, %rows, 1, 1, 1)
                                            %scores = matmul(%all_a, %all_b_t)
    """

    name: ClassVar[str] = "all_rows"

    def __call__(self, graph: Graph) -> Graph:
        if graph.batch_symbol is None:
            return gather_inputs(graph)
        apart = _JoinedApart(graph)
        joined = apart.run()
        try:
            return _Gathering(joined if apart.joins else graph).run()
        except _UnknownLayout as error:
            return graph.with_note(str(error))


class _UnknownLayout(Exception):
    """It is not known where in a dim the rows lie; caught by the pass."""


def _is_paired(node: fx.Node, graph: Graph) -> bool:
    """Tell whether a value has rows in two dims, or pairs of them in one."""
    if not meta.is_tensor(node):
        return False
    having = _row_dims(node, graph)
    squares = (power.base for dim in having for power in meta.expression(meta.shape(node)[dim]).atoms(sympy.Pow))
    return len(having) > 1 or graph.batch_symbol in squares


def _row_dims(node: fx.Node, graph: Graph) -> list[int]:
    """Return the dims of a value whose sizes depend on the number of rows."""
    return [dim for dim, size in enumerate(meta.shape(node)) if meta.depends_on_batch(size, graph)]


class _JoinedApart(Rewrite):
    """Rewrites joins of batches along their rows: stacked, their rows stay beside their own.

    Attributes:
        joins: how many there are.
    """

    joins = 0

    def visit(self, node: fx.Node) -> None:
        """Stack what is joined along its rows, and flatten."""
        if node.target is not aten.cat.default:
            return
        parts, dim = argument(node, "tensors"), int(argument(node, "dim")) % len(meta.shape(node))
        if all(meta.expression(meta.shape(part)[dim]) == self.graph.batch_symbol for part in parts):
            self.joins += 1
            stacked = insert(node, aten.stack.default, parts, dim)
            replace(node, insert(node, aten.flatten.using_ints, stacked, dim, dim + 1))


class _Gathering(CountingRewrite):
    """Rewrites ops in which rows meet, and brings them the rows that they read.

    Attributes:
        together: the ops that run on the rows of all replicas.
        total: how many rows all replicas have, as an example.
        whole: what has been gathered so far, by what a replica has of it.
        own: what a replica has of what is made of all rows, by that.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.given = dict(zip(self.graph.graph.nodes, graph.graph.nodes, strict=True))
        self.together: set[fx.Node] = set()
        assert graph.batch_symbol is not None, "rows are counted"
        self.total = meta.fresh_size(self.graph.graph, "all_rows", graph.batch_symbol)
        self.whole: dict[fx.Node, fx.Node] = {}
        self.own: dict[fx.Node, fx.Node] = {}
        self.given_graph, self.factors = graph, analyse(graph)
        self._total: fx.Node | None = None

    def run(self) -> Graph:
        """Return the graph rewritten; the given one where no rows meet."""
        counting = ancestors([node for _, node in self.graph.outputs_of(OutputKind.COUNT)])
        nodes = [node for node in self.graph.graph.nodes if node.op == "call_function" and node not in counting]
        for node in nodes:
            if self._starts(node) or any(not self._may_cut(source, node) for source in self._of_all_rows(node)):
                self.together.add(node)
        for node in nodes:
            self.visit(node)
        if not self.whole and not self.together:
            return self.given_graph
        self._cut_outputs()
        drop_dead_nodes(self.graph.graph)
        return self.graph.evolve(all_rows=meta.expression(self.total))

    def _starts(self, node: fx.Node) -> bool:
        """Tell whether rows meet in an op: it has a row for each pair, or cannot be cut by the rows that it reads."""
        given = self.given[node]
        return _is_paired(node, self.graph) or (self.factors.is_op(given) and self.factors.op(given).rows_meet)

    def _of_all_rows(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that have the rows of all replicas."""
        return [source for source in node.all_input_nodes if source in self.together and self._has_rows(source)]

    def _has_rows(self, node: fx.Node) -> bool:
        return meta.depends_on_batch(self.given[node], self.given_graph)

    def _may_cut(self, source: fx.Node, reader: fx.Node) -> bool:
        """Tell whether a replica's own rows of a value are known, and worth to be taken for an op that reads them."""
        return reader in self._leading_to_products and self._layout(source) is not None

    @cached_property
    def _leading_to_products(self) -> frozenset[fx.Node]:
        """Return the ops that products with parameters are made of, and those."""
        parameters = descendants(self.graph, [leaf.node for leaf in self.graph.leaves_of(LeafKind.PARAMETER)])
        found: set[fx.Node] = set()
        for node in reversed(self.graph.graph.nodes):
            if not found.isdisjoint(node.users) or self._is_product_with(node, parameters):
                found.add(node)
        return frozenset(found)

    def _is_product_with(self, node: fx.Node, parameters: frozenset[fx.Node]) -> bool:
        given = self.given[node]
        weighs = any(source in parameters and not self._has_rows(source) for source in node.all_input_nodes)
        return weighs and self.factors.is_op(given) and bool(self.factors.op(given).contracted_classes)

    def visit(self, node: fx.Node) -> None:
        """Let an op read the rows of all replicas, or those of its own; and the number of all rows in any case."""
        if node in self.together:
            self._run_on_all(node)
            return
        for source in self._of_all_rows(node):
            node.replace_input_with(source, self._own_rows(source, node))
        self._read_numbers(node)

    def _run_on_all(self, node: fx.Node) -> None:
        sources = [
            source
            for source in node.all_input_nodes
            if source not in self.together and meta.depends_on_batch(source, self.graph)
        ]
        for source in sources:
            node.replace_input_with(source, self._of_all(source, node))
        self._has_all_rows(node)

    def _read_numbers(self, node: fx.Node) -> None:
        """Let an op read the number of all rows wherever it reads one as a value."""
        given = self.given[node]
        if not self.factors.is_op(given):
            return
        numbers = [
            pair for pair in self.factors.op(given).numbers_of(node) if meta.depends_on_batch(pair[1], self.graph)
        ]
        if not numbers:
            return
        call = {"args": mutable_copy(node.args), "kwargs": mutable_copy(node.kwargs)}
        for path, number in numbers:
            set_entry(call, path, self._of_all(number, node))
        node.args, node.kwargs = tuple(call["args"]), call["kwargs"]

    def _of_all(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Return what a value is on the rows of all replicas, made before `here`."""
        if value not in self.whole:
            self.whole[value] = self._made_of_all(value, here)
        return self.whole[value]

    def _made_of_all(self, value: fx.Node, here: fx.Node) -> fx.Node:
        if not meta.is_tensor(value) and (value.target is aten.sym_size.int or not self._is_of_sizes(value)):
            return self._size(meta.expression(meta.value(value)), here)
        layout = self._layout(value)
        if self._is_of_sizes(value) or (layout is None and value.op == "call_function" and not is_random(value)):
            return self._again(value, here)
        return self._placed(value, layout, here)

    def _is_of_sizes(self, value: fx.Node) -> bool:
        """Tell whether a value is made of sizes alone, as a range of as many numbers as there are rows."""
        if value.op != "call_function" or is_random(value):
            return False
        return value.target is aten.sym_size.int or all(map(self._is_of_sizes, value.all_input_nodes))

    def _again(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Make a value again, of what the rows of all replicas have."""

        def source(argument: fx.Node) -> fx.Node:
            return self._of_all(argument, here) if meta.depends_on_batch(argument, self.graph) else argument

        args, kwargs = fx.node.map_arg((value.args, value.kwargs), source)
        with here.graph.inserting_before(here):
            made = here.graph.call_function(value.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]
        meta.copy_meta(value, made, with_value=True)
        self._has_all_rows(made)
        return made

    def _has_all_rows(self, node: fx.Node) -> None:
        """Let a node's example have as many rows as all replicas, where it has a replica's."""
        if self.graph.batch_symbol is not None and meta.depends_on_batch(node, self.graph):
            meta.substitute(node, self.graph.batch_symbol, self.total)

    def _size(self, expression: Any, here: fx.Node) -> fx.Node:
        """Return a size with as many rows as all replicas have."""
        if expression == self.graph.batch_symbol:
            return self._total_size(here)
        operation, operands = size_operation(expression)
        if operation is None:
            raise _UnknownLayout(f"it is not known what {expression} is for the rows of all replicas")
        first, *rest = (self._part(part, here) for part in operands)
        made: fx.Node = reduce(partial(insert, here, operation), rest, first)
        return made

    def _part(self, expression: Any, here: fx.Node) -> Any:
        """Return what a size is made of, a number or a node, with as many rows as all replicas have."""
        if self.graph.batch_symbol in expression.free_symbols:
            return self._size(expression, here)
        found = self.sizes.of_expression(expression)
        if found is None:
            raise _UnknownLayout(f"it is not known what {expression} is for the rows of all replicas")
        return found

    def _total_size(self, here: fx.Node) -> fx.Node:
        """Return the number of all rows, which is a count as a size."""
        if self._total is None:
            count = self.rows()
            with here.graph.inserting_before(here):
                self._total = here.graph.call_function(aten._local_scalar_dense.default, (count,))
            meta.copy_meta(here, self._total)
            meta.set_value(self._total, self.total)
        return self._total

    def _placed(self, value: fx.Node, layout: RowLayout | None, here: fx.Node) -> fx.Node:
        """Gather a value."""
        if layout is None:
            raise _UnknownLayout(
                f"rows meet each other at {meta.source_line(here)}, and how they lie in '{value.name}' of shape "
                f"{meta.hints(value)} is not known; it is exact with one pipeline and one micro-batch only"
            )
        return insert_row_mask(here, value, self._state(), self._total_size(here), layout)

    def _own_rows(self, value: fx.Node, here: fx.Node) -> fx.Node:
        """Return a replica's own rows of a value that is made of all rows."""
        if value not in self.own:
            layout = self._layout(value)
            assert layout is not None, "only what can be cut is"
            rows = self.sizes.of_expression(self.graph.batch_symbol)
            self.own[value] = insert(here, OWN, value, self._state(), rows, *layout)
        return self.own[value]

    def _layout(self, value: fx.Node) -> RowLayout | None:
        """Return where the rows of a value are; None if that is not known, or they are in several dims."""
        given = self.given.get(value, value)
        dims = _row_dims(given, self.given_graph) if meta.is_tensor(given) else []
        if len(dims) != 1:
            return None
        (dim,) = dims
        if meta.expression(meta.shape(given)[dim]) == self.given_graph.batch_symbol:
            return dim, 1, 1
        classes = self.factors.dims(given)[dim]
        at = next((i for i, cls in enumerate(classes) if cls.is_batch), None)
        sizes = [cls.size for i, cls in enumerate(classes) if i != at]
        if at is None or None in sizes:
            return None
        known = [size for size in sizes if size is not None]
        return dim, math.prod(known[:at]), math.prod(known[at:])

    def _state(self) -> fx.Node:
        self.graph, node = with_random_state(self.graph)
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


def gather_inputs(graph: Graph) -> Graph:
    """Return a graph with a static batch whose inputs have a replica's rows, and are gathered before they are read.

    A graph in which no input has rows is returned as it is.
    """
    fixed = graph.fixed_rows
    if fixed is None:
        return graph
    made, state = with_random_state(graph.clone())
    rows = meta.fresh_size(made.graph, "rows", fixed.number)
    first = next(node for node in made.graph.nodes if node.op != "placeholder")
    leaves = tuple(_cut(leaf, fixed, rows) for leaf in made.leaves)
    for leaf in leaves:
        if leaf.row_dim is not None and leaf.node.users:
            _gather(leaf, fixed.number, state, first)
    drop_dead_nodes(made.graph)
    return made.evolve(leaves=leaves, batch_symbol=meta.expression(rows))


def _cut(leaf: Leaf, fixed: FixedRows, rows: torch.SymInt) -> Leaf:
    """Return an input with a replica's rows."""
    if leaf.kind is not LeafKind.INPUT or leaf.name not in fixed.dims:
        return leaf
    node, dim = leaf.node, fixed.dims[leaf.name]
    shape = with_rows(meta.shape(node), dim, rows)
    meta.set_value(node, meta.fresh_placeholder_value(node.graph, shape, meta.dtype(node), meta.value(node).device))
    return dataclasses.replace(leaf, row_dim=dim)


def _gather(leaf: Leaf, total: int, state: fx.Node, first: fx.Node) -> None:
    """Put all rows in the place of an input."""
    readers = list(leaf.node.users)
    assert leaf.row_dim is not None, "it has rows"
    whole = insert_row_mask(first, leaf.node, state, total, (leaf.row_dim, 1, 1))
    for reader in readers:
        reader.replace_input_with(leaf.node, whole)
