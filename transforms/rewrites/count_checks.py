"""Let checks that raise count what they raise for: counts add up over the rows of micro-batches and replicas.

"Any element is negative" says of some rows what it says of them alone, and so does "not all are positive": how many
there are is a sum over rows, like a loss. Any other check (of a mean, say) has the rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand
from hetu_fx.graph.edit import ancestors, descendants, insert
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind, drop_dead_nodes
from hetu_fx.transforms.rewrites.counts import CountingRewrite, row_local_nodes

aten = torch.ops.aten

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
