"""Make means and variances over the batch sums over global counts, so that the loss is exact under unequal shares."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.base.dtypes import is_real
from hetu_fx.base.torch_private import schema
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, operand, overload
from hetu_fx.graph.edit import cast, insert, replace
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.meta import sum_dtype
from hetu_fx.transforms.rewrites.counts import CountingRewrite, row_local_nodes

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

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
PLAIN = aten.batch_norm.default
NEW_MEAN, NEW_VARIANCE = 3, 4  # results of FUNCTIONAL


@dataclass(frozen=True)
class GlobalMean:
    """Make every mean over rows a sum over rows divided by a global count.

    Requires: a captured graph. A static batch is left as it is.
    Ensures: no op divides by a local number of rows. Counts that add up over rows are leaves of kind COUNT, their local
        values outputs of kind COUNT, computed from inputs and constants alone; any other count is a sum in the graph,
        which replicas add up in the middle of a step. With the local counts fed back, loss and gradients are those of
        the given graph.

        %loss = cross_entropy_loss(%x, %y)    ->    %total = cross_entropy_loss(%x, %y, None, SUM, -100, 0.0)
                                                    %loss = div(%total, %count_0)
                                                    return (%loss, %valid)   # %valid = sum(%y != -100)
    """

    name: ClassVar[str] = "global_mean"

    def __call__(self, graph: Graph) -> Graph:
        if graph.batch_symbol is None:
            return graph
        return _MeanRewrite(graph).run()


class _MeanRewrite(CountingRewrite):
    """Rewrites means and what reads a number of rows.

    Attributes:
        row_local: values whose sums over rows are known before the step, as they add up.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.row_local = row_local_nodes(self.graph)

    def visit(self, node: fx.Node) -> None:
        """Rewrite a node if it takes a mean over rows or reads a number of rows."""
        if node.target in MEANS:
            self._mean(node)
        elif node.target in CLASSIFICATION | ELEMENTWISE:
            if argument(node, "reduction") == MEAN and any(map(self._has_rows, node.all_input_nodes)):
                self._loss(node)
        elif node.target in SUMS:
            self._sum(node)
        elif _reads_number(node):
            self._number(node)

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and meta.depends_on_batch(value, self.graph)

    def _mean(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dims = _reduced_dims(node)
        sizes = meta.shape(source)
        if not any(meta.depends_on_batch(sizes[dim], self.graph) for dim in dims):
            return
        keep = bool(argument(node, "keepdim")) if node.target is aten.mean.dim else False
        count = self.of_dims(node, source, dims, keep)
        summed = insert(node, aten.sum.dim_IntList, source, dims, keep, dtype=sum_dtype(meta.dtype(node)))
        if source in self.row_local and meta.shape(summed) == ():
            summed = self.hoist(summed)
        self._divide(node, summed, count)

    def _loss(self, node: fx.Node) -> None:
        each = _with_reduction(node, NONE)
        count = self._loss_count(node, each)
        if sum_dtype(meta.dtype(node)) == meta.dtype(node):
            total = _with_reduction(node, SUM)
        else:  # a sum over many tokens would overflow the loss's own dtype
            total = insert(node, aten.sum.default, each, dtype=torch.float32)
        self._divide(node, total, count)
        if not each.users:
            each.graph.erase_node(each)

    def _loss_count(self, node: fx.Node, each: fx.Node) -> fx.Node:
        """Return the global count that a mean loss divides by, as torch defines it."""
        target = node.args[1]
        assert isinstance(target, fx.Node)
        if node.target in ELEMENTWISE or is_real(meta.dtype(target)):
            return self.of_dims(node, each, range(len(meta.shape(each))))
        weight = argument(node, "weight")
        local = self.of_labels(node, target, weight)
        return self.hoist(local) if {target, weight} - {None} <= self.row_local else local

    def _sum(self, node: fx.Node) -> None:
        """Hoist a number that the user counts in the inputs, such as mask.sum()."""
        if node.args[0] not in self.row_local or meta.shape(node) != () or not self._has_rows(node.args[0]):
            return
        users = list(node.users)
        leaf = self.hoist(node)
        for user in users:
            user.replace_input_with(node, leaf)

    def _number(self, node: fx.Node) -> None:
        """Let an op on a tensor and a number of rows read the global number."""
        number = node.args[1]
        assert isinstance(number, fx.Node)
        value = self._as_tensor(node, number)
        if value is number or value is None:  # the latter is of all rows, as anything made of numbers of them (AllRows)
            return
        source, *rest = (*node.args[:1], *node.args[2:])
        if meta.shape(operand(node)) == () and is_real(meta.dtype(operand(node))):
            value = insert(node, aten.to.dtype, value, meta.dtype(node))
        replace(node, insert(node, WITH_NUMBER[node.target], source, value, *rest, **node.kwargs))

    def _as_tensor(self, here: fx.Node, number: Any) -> Any:
        """Return a number's global value: itself if rows do not matter, or a 0-d tensor; None if unknown."""
        if not isinstance(number, fx.Node) or not self._has_rows(number):
            return number
        count = self.of_size(here, meta.expression(meta.value(number)))
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
        replace(node, cast(node, mean, meta.dtype(node)))


@dataclass(frozen=True)
class BatchStatistics:
    """Make batch norm in training sums over rows and positions, divided by their global count.

    Requires: a captured graph. A static batch is left as it is.
    Ensures: no op takes statistics over rows on its own: they are plain sums, in two passes (the mean, then the
        mean of squared deviations from it), so that deduction sees what must be summed over replicas. Running
        statistics take the unbiased variance, as torch's do.

        %y, ... = batch_norm(%x, ...)     ->     %mean = div(sum(%x, [0, 2, 3], True), %count)
                                                 %deviation = sub(%x, %mean)
                                                 %variance = div(sum(mul(%deviation, %deviation), ...), %count)
                                                 %y = mul(%deviation, rsqrt(add(%variance, eps))) * w + b
    """

    name: ClassVar[str] = "batch_statistics"

    def __call__(self, graph: Graph) -> Graph:
        if graph.batch_symbol is None:
            return graph
        return _StatisticsRewrite(graph).run()


class _StatisticsRewrite(CountingRewrite):
    """Rewrites batch norms that take statistics."""

    def visit(self, node: fx.Node) -> None:
        """Write a batch norm in training out."""
        if node.target not in (FUNCTIONAL, PLAIN) or not node.args[5]:
            return
        source = operand(node)
        dims = [0, *range(2, len(meta.shape(source)))]
        _BatchNorm(node, source, self.of_dims(node, source, dims, keepdim=True)).rewrite()


class _BatchNorm:
    """One batch norm, written out."""

    def __init__(self, node: fx.Node, source: fx.Node, count: fx.Node) -> None:
        self.node = node
        rank = len(meta.shape(source))
        self.dims = [0, *range(2, rank)]
        self.per_channel = [-1, *[1] * (rank - 2)]
        self.dtype = meta.dtype(source)
        self.working_dtype = sum_dtype(self.dtype)
        self.source, self.count = (self._cast(value, self.working_dtype) for value in (source, count))

    def rewrite(self) -> None:
        """Replace the node and what is taken out of it."""
        mean = self._mean(self.source)
        deviation = self._op(aten.sub.Tensor, self.source, mean)
        variance = self._mean(self._op(aten.mul.Tensor, deviation, deviation))
        output = self._normalized(deviation, variance)
        if self.node.target is PLAIN:
            replace(self.node, output)
            return
        results = {0: output, NEW_MEAN: self._new_mean(mean), NEW_VARIANCE: self._new_variance(variance)}
        for item in list(self.node.users):
            assert item.target is operator.getitem
            replace(item, results[item.args[1]])  # type: ignore[index]
        self.node.graph.erase_node(self.node)

    def _normalized(self, deviation: fx.Node, variance: fx.Node) -> fx.Node:
        _, weight, bias, *_ = self.node.args
        rate = self._op(aten.rsqrt.default, self._op(aten.add.Tensor, variance, self.node.args[7]))
        result = self._op(aten.mul.Tensor, deviation, rate)
        if weight is not None:
            result = self._op(aten.mul.Tensor, result, self._spread(weight))
        if bias is not None:
            result = self._op(aten.add.Tensor, result, self._spread(bias))
        return self._cast(result, self.dtype)

    def _spread(self, channels: Any) -> fx.Node:
        typed = self._cast(channels, self.working_dtype)
        return self._op(aten.reshape.default, typed, self.per_channel)

    def _mean(self, values: fx.Node) -> fx.Node:
        return self._op(aten.div.Tensor, self._op(aten.sum.dim_IntList, values, self.dims, True), self.count)

    def _new_mean(self, mean: fx.Node) -> fx.Node:
        return self._moved(self.node.args[3], mean)

    def _new_variance(self, variance: fx.Node) -> fx.Node:
        """Move the running variance towards variance * count / (count - 1)."""
        fewer = self._op(aten.sub.Tensor, self.count, 1)
        unbiased = self._op(aten.mul.Tensor, variance, self._op(aten.div.Tensor, self.count, fewer))
        return self._moved(self.node.args[4], unbiased)

    def _moved(self, running: Any, statistic: fx.Node) -> fx.Node:
        """Return running * (1 - momentum) + statistic * momentum, without gradient."""
        momentum: Any = self.node.args[6]
        flat = self._op(aten.reshape.default, self._op(aten.detach.default, statistic), [-1])
        typed = self._cast(flat, meta.dtype(running))
        kept = self._op(aten.mul.Tensor, running, 1 - momentum)
        return self._op(aten.add.Tensor, kept, self._op(aten.mul.Tensor, typed, momentum))

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self.node, value, dtype)

    def _op(self, target: Any, *args: Any) -> fx.Node:
        return insert(self.node, target, *args)


def _with_reduction(node: fx.Node, reduction: int) -> fx.Node:
    given = arguments(node) | {"reduction": reduction}
    options = {e.name: given.pop(e.name) for e in schema(overload(node)).arguments if e.kwarg_only}
    return insert(node, overload(node), *given.values(), **options)


def _reduced_dims(node: fx.Node) -> list[int]:
    rank = len(meta.shape(operand(node)))
    given = argument(node, "dim") if node.target is aten.mean.dim else None
    return [dim % rank for dim in given] if given else list(range(rank))


def _reads_number(node: fx.Node) -> bool:
    if node.target not in WITH_NUMBER or len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return False
    return not meta.is_tensor(node.args[1])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and meta.is_tensor(value)
