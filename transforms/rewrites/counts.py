"""Global counts: numbers of rows or tokens that the whole batch decides, fed to the graph from outside.

A count is hoisted: its local value becomes an output of kind COUNT, computed from inputs alone, and the graph
reads a new leaf of kind COUNT instead. The runtime runs the part of the program that makes the local values before the
step, as a prologue, sums them over micro-batches and replicas, and feeds the sum.

Let checks that raise count what they raise for: counts add up over the rows of micro-batches and replicas. "Any element
is negative" says of some rows what it says of them alone, and so does "not all are positive": how many there are is a
sum over rows, like a loss. Any other check (of a mean, say) has the rows of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar

import sympy
import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, is_random, operand
from hetu_fx.graph.edit import Rewrite, add_leaf, add_output, ancestors, descendants, insert
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind, drop_dead_nodes
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


MOST_COUNTED = 8
"""Checks that are known before the step: ranks exchange a few counts only. Others are made in it."""

ANY = frozenset({aten.any.default, aten.any.dim, aten.any.dims})
ALL = frozenset({aten.all.default, aten.all.dim, aten.all.dims})
NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})
EITHER = frozenset({aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor})
BOTH = frozenset({aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor})
LARGEST, SMALLEST = (aten.max.default, aten.amax.default), (aten.min.default, aten.amin.default)
FROM, ABOVE, UP_TO, BELOW = aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar

OF_SOME = frozenset(
    [(compared, of) for compared in (FROM, ABOVE) for of in LARGEST]
    + [(compared, of) for compared in (UP_TO, BELOW) for of in SMALLEST]
)
"""Comparisons of an extreme that are true where they are of any element; not of NaN, which is the extreme then."""
OF_EACH = frozenset(
    [(compared, of) for compared in (UP_TO, BELOW) for of in LARGEST]
    + [(compared, of) for compared in (FROM, ABOVE) for of in SMALLEST]
)
"""Comparisons of an extreme that are true where they are of each element."""


@dataclass(frozen=True)
class CountChecks:
    """Let every check count what it raises for.

    Requires: a captured graph.
    Ensures: outputs of kind CHECK are whole numbers without dims, more than zero where the forward raises. Where it
        raises for any element, they are sums over rows, and so are those of parameters, which count once for each row;
        no gradient goes back from any. Some that are made of inputs and constants alone, row by row, are outputs of
        kind COUNT, which are known before the step.

        %any = any(%negative)      ->      %number = sum(%negative)
        return (%loss, %any)               return (%loss, %number)
    """

    name: ClassVar[str] = "count_checks"

    def __call__(self, graph: Graph) -> Graph:
        return _ChecksRewrite(graph).run() if graph.outputs_of(OutputKind.CHECK) else graph


class _ChecksRewrite(CountingRewrite):
    """Rewrites the outputs that are checks."""

    def run(self) -> Graph:
        """Return the graph rewritten."""
        checks = {leaf.name: node for leaf, node in self.graph.outputs_of(OutputKind.CHECK)}
        raising = {name: list(self._true(node, True)) for name, node in checks.items()}
        counts = {name: self._count(checks[name], found) for name, found in raising.items()}
        known = [] if self.graph.batch_symbol is None else self._of_inputs(raising)
        pairs = zip(self.graph.outputs, self.graph.output_values, strict=True)
        kept = [
            (leaf, counts[leaf.name] if leaf.kind is OutputKind.CHECK else node)
            for leaf, node in pairs
            if leaf.kind is not OutputKind.CHECK or leaf.name not in known
        ]
        self.graph.output_node.args = (tuple(node for _, node in kept),)
        self.graph = self.graph.evolve(outputs=tuple(leaf for leaf, _ in kept))
        for name in known:
            self._add(name, counts[name])
        drop_dead_nodes(self.graph.graph)
        self._detach()
        return self.graph

    def _detach(self) -> None:
        """Detach what checks read of the rest of the graph: a parameter that one looks at has no gradient of that."""
        checks = [node for _, node in self.graph.outputs_of(OutputKind.CHECK)]
        others = [node for node in self.graph.output_values if node not in checks]
        asking = ancestors(checks) - ancestors(others)
        for node in [one for one in self.graph.graph.nodes if one in asking]:
            for source in node.all_input_nodes:
                if source not in asking and meta.is_tensor(source) and carries_gradient(meta.dtype(source)):
                    node.replace_input_with(source, insert(node, aten.detach.default, source))

    def visit(self, node: fx.Node) -> None:
        """Leave ops as they are: outputs are rewritten."""

    def _of_inputs(self, raising: dict[str, list[fx.Node]]) -> list[str]:
        """Return the names of checks that are known before the step."""
        row_local = row_local_nodes(self.graph)
        return [name for name, found in raising.items() if row_local.issuperset(found)][:MOST_COUNTED]

    def _count(self, check: fx.Node, found: Sequence[fx.Node]) -> fx.Node:
        """Return how many elements of some truth values are true, for a check; what has no rows, once for each row."""
        of_the_batch = self._of_the_batch()
        numbers = [self._number(check, one, has_rows=one in of_the_batch) for one in found]
        return reduce(lambda one, other: self._made(check, aten.add.Tensor, one, other), numbers)

    def _number(self, check: fx.Node, truths: fx.Node, *, has_rows: bool) -> fx.Node:
        number = self._made(check, aten.sum.default, truths)
        if has_rows or self.graph.batch_symbol is None:
            return number
        return self._made(check, aten.mul.Tensor, number, self.sizes.of_expression(self.graph.batch_symbol))

    def _of_the_batch(self) -> frozenset[fx.Node]:
        """Return what changes with the batch."""
        return descendants(self.graph, [leaf.node for leaf in self.graph.leaves_of(LeafKind.INPUT)])

    def _true(self, node: fx.Node, wanted: bool) -> Iterable[fx.Node]:
        """Yield truth values, of which some element is true if, and only if, some element of `node` is as `wanted`."""
        target, source = node.target, next(iter(node.all_input_nodes), None)
        if source is None:
            yield self._truth(node, wanted)
        elif target in (ANY if wanted else ALL) or (target is aten.ne.Scalar and node.args[1] == 0):
            yield from self._true(source, wanted)
        elif target in NOT and meta.dtype(source) is torch.bool:
            yield from self._true(source, not wanted)
        elif target in (EITHER if wanted else BOTH) and self._are_truths_alike(node):
            for one in node.all_input_nodes:
                yield from self._true(one, wanted)
        elif (target, source.target) in (OF_SOME if wanted else OF_EACH) and self._is_ordered(source, wanted):
            each = self._made(node, target, operand(source), node.args[1])
            yield self._truth(each, wanted)
        else:
            yield self._truth(node, wanted)

    def _are_truths_alike(self, node: fx.Node) -> bool:
        sources = node.all_input_nodes
        return all(meta.dtype(one) is torch.bool and meta.same_shape(one, node) for one in sources)

    def _is_ordered(self, extreme: fx.Node, wanted: bool) -> bool:
        """Tell whether a comparison of an extreme is one of elements; one that is to be true is not, of NaN."""
        return not wanted or not carries_gradient(meta.dtype(extreme))

    def _truth(self, node: fx.Node, wanted: bool) -> fx.Node:
        """Return which elements of a value are true, or are not."""
        if meta.dtype(node) is torch.bool:
            return node if wanted else self._made(node, aten.logical_not.default, node)
        return self._made(node, aten.ne.Scalar if wanted else aten.eq.Scalar, node, 0)

    def _made(self, of: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Insert an op before the outputs, on the line and in the modules of another."""
        made = insert(self.graph.output_node, target, *args)
        meta.copy_meta(of, made)
        return made
