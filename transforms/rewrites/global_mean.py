"""Make means over the batch sums over global counts, so that the loss is exact under unequal shares."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.base.torch_private import schema
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, operand, overload
from hetu_fx.graph.edit import insert, replace
from hetu_fx.graph.graph import Graph, drop_dead_nodes
from hetu_fx.graph.meta import sum_dtype
from hetu_fx.transforms.rewrites.counts import Counts

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # torch's codes of the reduction argument

CLASSIFICATION = frozenset({
    aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default,
})  # fmt: skip
ELEMENTWISE = frozenset({
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
    aten.soft_margin_loss.default, aten.hinge_embedding_loss.default, aten.cosine_embedding_loss.default,
    aten.margin_ranking_loss.default, aten.triplet_margin_loss.default, aten.poisson_nll_loss.default,
    aten.multi_margin_loss.default, aten.multilabel_margin_loss.default,
})  # fmt: skip
MEANS = frozenset({aten.mean.default, aten.mean.dim})
SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default})

# Ops on tensors that take a number, and the form of the op that takes a tensor instead.
WITH_NUMBER: dict[Any, Any] = {
    aten.div.Tensor: aten.div.Tensor, aten.div.Scalar: aten.div.Tensor,
    aten.mul.Tensor: aten.mul.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Tensor: aten.add.Tensor, aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor, aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor, aten.rsub.Tensor: aten.rsub.Tensor,
}  # fmt: skip
ON_NUMBERS: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
}  # fmt: skip


@dataclass(frozen=True)
class GlobalMean:
    """Make every mean over rows a sum over rows divided by a global count.

    Requires: a captured graph. A static batch is left as it is.
    Ensures: no op divides by a local number of rows; counts are leaves of kind COUNT, their local values
        outputs of kind COUNT, computed from inputs and constants alone. With the local counts fed back, loss
        and gradients are those of the given graph. What could not be rewritten is noted.

        %loss = cross_entropy_loss(%x, %y)    ->    %total = cross_entropy_loss(%x, %y, None, SUM, -100, 0.0)
                                                    %loss = div(%total, %count_0)
                                                    return (%loss, %valid)   # %valid = sum(%y != -100)
    """

    name: ClassVar[str] = "global_mean"

    def __call__(self, graph: Graph) -> Graph:
        if graph.batch_symbol is None:
            return graph
        rewrite = _MeanRewrite(graph.clone())
        for node in list(rewrite.counts.graph.graph.nodes):
            if node.op == "call_function":
                rewrite.visit(node)
        result = rewrite.counts.graph.with_note(*rewrite.notes)
        drop_dead_nodes(result.graph)
        return result


class _MeanRewrite:
    """Rewrites one clone, node by node."""

    def __init__(self, graph: Graph) -> None:
        self.counts = Counts(graph)
        self.notes: list[str] = []

    def visit(self, node: fx.Node) -> None:
        """Rewrite a node if it takes a mean over rows or reads a number of rows."""
        if node.target in MEANS:
            self._mean(node)
        elif node.target in CLASSIFICATION | ELEMENTWISE:
            if argument(node, "reduction") == MEAN and self._has_rows(node.args[0]):
                self._loss(node)
        elif node.target in SUMS:
            self._sum(node)
        elif _reads_number(node):
            self._number(node)

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and meta.depends_on_batch(value, self.counts.graph)

    def _mean(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dims = _reduced_dims(node)
        sizes = meta.shape(source)
        if not any(meta.depends_on_batch(sizes[dim], self.counts.graph) for dim in dims):
            return
        count = self.counts.of_size(node, _product(sizes[dim] for dim in dims))
        if count is None:
            self._note(node, "its count is not proportional to the rows")
            return
        keep = bool(argument(node, "keepdim")) if node.target is aten.mean.dim else False
        summed = insert(node, aten.sum.dim_IntList, source, dims, keep, dtype=sum_dtype(meta.dtype(node)))
        if source in self.counts.input_only and meta.shape(summed) == ():
            summed = self.counts.hoist(summed)
        self._divide(node, summed, count)

    def _loss(self, node: fx.Node) -> None:
        each = _with_reduction(node, NONE)
        count = self._loss_count(node, each)
        if count is None:
            each.graph.erase_node(each)
            return
        if sum_dtype(meta.dtype(node)) == meta.dtype(node):
            total = _with_reduction(node, SUM)
        else:  # a sum over many tokens would overflow the loss's own dtype
            total = insert(node, aten.sum.default, each, dtype=torch.float32)
        self._divide(node, total, count)
        if not each.users:
            each.graph.erase_node(each)

    def _loss_count(self, node: fx.Node, each: fx.Node) -> fx.Node | None:
        """Return the global count that a mean loss divides by, as torch defines it."""
        target = node.args[1]
        assert isinstance(target, fx.Node)
        if node.target in ELEMENTWISE or meta.dtype(target).is_floating_point:
            count = self.counts.of_size(node, _product(meta.shape(each)))
            if count is None:
                self._note(node, "its count is not proportional to the rows")
            return count
        if target not in self.counts.input_only:
            self._note(node, "its labels are not computed from inputs alone")
            return None
        weight = argument(node, "weight")
        if weight is None:
            return self.counts.hoist(self._valid_labels(node, target))
        if weight not in self.counts.input_only:
            self._note(node, "its class weights are no constant")
            return None
        return self.counts.hoist(self._weight_of_labels(node, target, weight))

    def _valid_labels(self, node: fx.Node, target: fx.Node) -> fx.Node:
        valid = insert(node, aten.ne.Scalar, target, argument(node, "ignore_index"))
        return self._known(insert(node, aten.sum.default, valid))

    def _weight_of_labels(self, node: fx.Node, target: fx.Node, weight: fx.Node) -> fx.Node:
        ignored = insert(node, aten.eq.Scalar, target, argument(node, "ignore_index"))
        labels = insert(node, aten.masked_fill.Scalar, target, ignored, 0)
        flat = insert(node, aten.reshape.default, labels, [-1])
        weights = insert(node, aten.index_select.default, weight, 0, flat)
        dropped = insert(node, aten.reshape.default, ignored, [-1])
        kept = insert(node, aten.masked_fill.Scalar, weights, dropped, 0.0)
        return insert(node, aten.sum.default, kept)

    def _known(self, local: fx.Node) -> fx.Node:
        """Return an equal count that is hoisted already, so that two losses over the same labels share it."""
        for other in self.counts.leaves:
            if _same_call(other, local):
                return other
        return local

    def _sum(self, node: fx.Node) -> None:
        """Hoist a number that the user counts in the inputs, such as mask.sum()."""
        if node not in self.counts.input_only or meta.shape(node) != () or not self._has_rows(node.args[0]):
            return
        users = list(node.users)
        leaf = self.counts.hoist(node)
        for user in users:
            user.replace_input_with(node, leaf)

    def _number(self, node: fx.Node) -> None:
        """Let an op on a tensor and a number of rows read the global number."""
        number = node.args[1]
        assert isinstance(number, fx.Node)
        value = self._as_tensor(node, number)
        if value is None:
            self._note(node, "it reads a number of rows that is not a global count")
            return
        source, *rest = (*node.args[:1], *node.args[2:])
        if meta.shape(operand(node)) == () and meta.dtype(operand(node)).is_floating_point:
            value = insert(node, aten.to.dtype, value, meta.dtype(node))
        replace(node, insert(node, WITH_NUMBER[node.target], source, value, *rest, **node.kwargs))

    def _as_tensor(self, here: fx.Node, number: Any) -> Any:
        """Return a number's global value: itself if rows do not matter, or a 0-d tensor; None if unknown."""
        if not isinstance(number, fx.Node) or not self._has_rows(number):
            return number
        count = self.counts.of_size(here, meta.expression(meta.value(number)))
        if count is not None:
            return count
        target = ON_NUMBERS.get(number.target)
        if target is None:
            return self._as_tensor(here, number.args[0]) if number.target is torch.sym_float else None
        parts = [self._as_tensor(here, part) for part in number.args]
        if any(part is None for part in parts):
            return None
        first = parts[0] if _is_tensor(parts[0]) else insert(here, aten.scalar_tensor.default, parts[0])
        return insert(here, target, first, parts[1])

    def _divide(self, node: fx.Node, total: fx.Node, count: fx.Node) -> None:
        mean = insert(node, aten.div.Tensor, total, count)
        if meta.dtype(mean) != meta.dtype(node):
            mean = insert(node, aten.to.dtype, mean, meta.dtype(node))
        replace(node, mean)

    def _note(self, node: fx.Node, why: str) -> None:
        self.notes.append(
            f"{node.target} at {meta.source_line(node)} takes a mean over rows that stays local, as {why}; "
            "it is exact with one pipeline and one micro-batch only"
        )


def _with_reduction(node: fx.Node, reduction: int) -> fx.Node:
    given = arguments(node) | {"reduction": reduction}
    options = {e.name: given.pop(e.name) for e in schema(overload(node)).arguments if e.kwarg_only}
    return insert(node, overload(node), *given.values(), **options)


def _reduced_dims(node: fx.Node) -> list[int]:
    rank = len(meta.shape(operand(node)))
    given = argument(node, "dim") if node.target is aten.mean.dim else None
    return [dim % rank for dim in given] if given else list(range(rank))


def _product(sizes: Any) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * meta.expression(size)
    return result


def _reads_number(node: fx.Node) -> bool:
    if node.target not in WITH_NUMBER or len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return False
    return not meta.is_tensor(node.args[1])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and meta.is_tensor(value)


def _same_call(first: fx.Node, second: fx.Node) -> bool:
    """Tell whether two nodes compute the same from the same leaves."""
    if first is second:
        return True
    alike = first.op == second.op == "call_function" and first.target is second.target
    if not alike or first.kwargs != second.kwargs or len(first.args) != len(second.args):
        return False
    pairs = zip(first.args, second.args, strict=True)
    return all(_same_call(a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else a == b for a, b in pairs)
