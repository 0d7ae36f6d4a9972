"""Global counts: numbers of rows or tokens that the whole batch decides, fed to the graph from outside.

A count is hoisted: its local value becomes an output of kind COUNT, computed from inputs alone, and the graph
reads a new leaf of kind COUNT instead. The runtime runs the part of the program that makes the local values before the
step, as a prologue, sums them over micro-batches and replicas, and feeds the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST
from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, is_random
from hetu_fx.graph.edit import Rewrite, add_leaf, add_output, insert
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.graph.meta import sum_dtype
from hetu_fx.graph.placed import placed_copy

aten = torch.ops.aten

ROWS = "count_rows"


class CountingRewrite(Rewrite):
    """A rewrite that hoists counts, each once."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.leaves: dict[fx.Node, fx.Node] = {}

    def hoist(self, local: fx.Node) -> fx.Node:
        """Return the leaf of the global sum of `local`, a 0-d sum over rows of what is made of each row's inputs."""
        if local not in self.leaves:
            taken = len(self.graph.leaves_of(LeafKind.COUNT))
            self.leaves[local] = self._add(f"count_{taken}", local)
        return self.leaves[local]

    def _add(self, name: str, local: fx.Node) -> fx.Node:
        self.graph, leaf = add_leaf(self.graph, LeafKind.COUNT, name, (), meta.dtype(local))
        self.graph = add_output(self.graph, OutputKind.COUNT, name, local)
        return leaf

    def rows(self) -> fx.Node:
        """Return the leaf of the number of rows in the global batch, int64."""
        known = next((leaf.node for leaf in self.graph.leaves_of(LeafKind.COUNT) if leaf.name == ROWS), None)
        if known is not None:
            return known
        size = self.sizes.of_expression(self.graph.batch_symbol)
        assert isinstance(size, fx.Node), "the batch symbol is the size of an input"
        local = insert(size.next, aten.scalar_tensor.default, size, dtype=torch.int64)
        self.sizes.last = local
        return self._add(ROWS, local)

    def of_size(self, here: fx.Node, expression: Any) -> fx.Node | None:
        """Return the global value of a size as a 0-d tensor at `here`; None if it is not linear in the rows.

        Args:
            here: where the value is used.
            expression: a sympy expression, such as batch * sequence.
        """
        per_row = linear_factor(expression, self.graph.batch_symbol)
        factor = None if per_row is None else self.sizes.of_expression(per_row)
        if factor is None:
            return None
        rows = self.rows()
        return rows if factor == 1 else insert(here, aten.mul.Tensor, rows, factor)

    def of_sizes(self, here: fx.Node, sizes: Iterable[meta.Size]) -> fx.Node | None:
        """Return the global value of a product of sizes, as `of_size` does."""
        return self.of_size(here, math.prod(map(meta.expression, sizes)))

    def of_dims(self, here: fx.Node, source: fx.Node, dims: Sequence[int], keepdim: bool = False) -> fx.Node:
        """Return the global number of elements in some dims of a value.

        Where it is not linear in the rows, or sizes of inputs do not tell it, the elements are counted one by one.
        """
        sizes = meta.shape(source)
        known = self.of_sizes(here, (sizes[dim] for dim in dims))
        if known is not None:
            return known
        ones = insert(here, aten.ones_like.default, source)
        return insert(here, aten.sum.dim_IntList, ones, list(dims), keepdim, dtype=sum_dtype(meta.dtype(source)))

    def of_labels(self, loss: fx.Node, labels: fx.Node, weight: fx.Node | None) -> fx.Node:
        """Return the number of labels of a loss that it does not ignore, or the sum of their classes' weights."""
        return self._valid_labels(loss, labels) if weight is None else self._weight_of_labels(loss, labels, weight)

    def _valid_labels(self, node: fx.Node, labels: fx.Node) -> fx.Node:
        valid = insert(node, aten.ne.Scalar, labels, argument(node, "ignore_index"))
        return self._known(insert(node, aten.sum.default, valid))

    def _weight_of_labels(self, node: fx.Node, labels: fx.Node, weight: fx.Node) -> fx.Node:
        ignored = insert(node, aten.eq.Scalar, labels, argument(node, "ignore_index"))
        known = insert(node, aten.masked_fill.Scalar, labels, ignored, 0)
        flat = insert(node, aten.reshape.default, known, [-1])
        weights = insert(node, aten.index_select.default, weight, 0, flat)
        dropped = insert(node, aten.reshape.default, ignored, [-1])
        kept = insert(node, aten.masked_fill.Scalar, weights, dropped, 0.0)
        return insert(node, aten.sum.default, kept)

    def _known(self, local: fx.Node) -> fx.Node:
        """Return an equal count that is hoisted already, so that two losses over the same labels share it."""
        for other in self.leaves:
            if _same_call(other, local):
                return other
        return local


def _same_call(first: fx.Node, second: fx.Node) -> bool:
    """Tell whether two nodes compute the same from the same leaves."""
    if first is second:
        return True
    alike = first.op == second.op == "call_function" and first.target is second.target
    if not alike or first.kwargs != second.kwargs or len(first.args) != len(second.args):
        return False
    pairs = zip(first.args, second.args, strict=True)
    return all(_same_call(a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else a == b for a, b in pairs)


def linear_factor(expression: Any, symbol: sympy.Symbol | None) -> Any:
    """Return expression / symbol if it does not contain the symbol any more; else None."""
    if symbol is None or isinstance(expression, int):
        return None
    plain = expression.replace(lambda part: part.func.__name__ == "ToFloat", lambda part: part.args[0])
    factor = sympy.cancel(plain / symbol)
    return None if symbol in factor.free_symbols else factor


def row_local_nodes(graph: Graph) -> frozenset[fx.Node]:
    """Return what is made of inputs and constants alone, and of each row's own: sums over its rows add up.

    Rows add up to those of the batch wherever they lie only of such values: not of one that was divided by a sum over
    rows before, nor of positions or numbers of rows.
    """
    given = _input_only_nodes(graph)
    factors = analyse(graph, given)
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node in given and found.issuperset(node.all_input_nodes) and _is_row_local(node, factors, graph):
            found.add(node)
    return frozenset(found)


def _is_row_local(node: fx.Node, factors: FactorMap, graph: Graph) -> bool:
    """Tell whether an op makes each row of that row alone."""
    if not factors.is_op(node):
        return True
    op = factors.op(node)
    counted = any(meta.depends_on_batch(number, graph) for _, number in op.numbers_of(node))
    return not counted and not op.rows_meet and not any(cls.is_batch for cls in op.reduced)


def _input_only_nodes(graph: Graph) -> frozenset[fx.Node]:
    """Return the nodes that are computed from inputs and constants alone, sizes included."""
    kinds = (LeafKind.INPUT, LeafKind.CONSTANT)
    found = {leaf.node for leaf in graph.leaves if leaf.kind in kinds}
    for node in graph.graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes) and not is_random(node):
            found.add(node)
    return frozenset(found)


_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True, eq=False)
class Prologue:
    """Computes the local counts of some rows.

    Attributes:
        inputs: names of the inputs it reads.
        constants: values of the constants it reads.
        compute: takes the device, inputs there, then constants, and returns the counts.
        reads_values: counts depend on the values of inputs, not only on their sizes.
    """

    inputs: tuple[str, ...]
    constants: tuple[Tensor, ...]
    compute: Callable[..., tuple[Tensor, ...]]
    reads_values: bool = True

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Return the counts of the rows in `inputs`, in the order of the graph's COUNT leaves."""
        return tuple(map(float, self.counted(inputs)))

    def counted(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the counts as tensors without dims on the device of the inputs, which the host has not waited for."""
        values = [inputs[name] for name in self.inputs]
        device = values[0].device if values else HOST
        with torch.no_grad():
            return self.compute(device, *values, *(constant.to(device) for constant in self.constants))


def extract_prologue(graph: Graph) -> Prologue:
    """Return the part of a graph that computes its local counts from inputs and constants."""
    part = graph.select(lambda leaf: leaf.kind is OutputKind.COUNT)
    for leaf in part.leaves:
        if not leaf.node.users:
            part.graph.erase_node(leaf.node)
    used = [leaf for leaf in part.leaves if leaf.node.users]
    inputs = tuple(leaf.name for leaf in used if leaf.kind is LeafKind.INPUT)
    constants = tuple(graph.constants[leaf.name] for leaf in used if leaf.kind is LeafKind.CONSTANT)
    kinds = [leaf.kind for leaf in used]
    assert set(kinds) <= {LeafKind.INPUT, LeafKind.CONSTANT}, "counts are computed from inputs and constants"
    order = sorted(range(len(used)), key=lambda index: kinds[index] is LeafKind.CONSTANT)

    @cache
    def module_at(device: torch.device) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), placed_copy(part.graph, device))

    def compute(device: torch.device, *values: Tensor) -> tuple[Tensor, ...]:
        placed = dict(zip(order, values, strict=True))
        return tuple(module_at(device).forward(*(placed[index] for index in range(len(used)))))

    users = {user for leaf in used if leaf.kind is LeafKind.INPUT for user in leaf.node.users}
    return Prologue(inputs, constants, compute, reads_values=any(user.target is not _SIZE for user in users))
