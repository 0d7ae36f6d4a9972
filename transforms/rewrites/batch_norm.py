"""Write batch norm out as sums over the batch divided by the global count."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.edit import insert, replace
from hetu_fx.graph.graph import Graph, drop_dead_nodes
from hetu_fx.graph.meta import sum_dtype
from hetu_fx.transforms.rewrites.counts import Counts

aten = torch.ops.aten

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
PLAIN = aten.batch_norm.default
NEW_MEAN, NEW_VARIANCE = 3, 4  # results of FUNCTIONAL


@dataclass(frozen=True)
class BatchStatistics:
    """Make batch norm in training sums over rows and positions, divided by their global count.

    Requires: a captured graph. A static batch is left as it is.
    Ensures: no op takes statistics over rows on its own: they are plain sums, in two passes (the mean, then the
        mean of squared deviations from it), so that deduction sees what must be summed over replicas. Running
        statistics take the unbiased variance, as torch's do. A batch norm that cannot be rewritten is noted.

        %y, ... = batch_norm(%x, ...)     ->     %mean = div(sum(%x, [0, 2, 3], True), %count)
                                                 %deviation = sub(%x, %mean)
                                                 %variance = div(sum(mul(%deviation, %deviation), ...), %count)
                                                 %y = mul(%deviation, rsqrt(add(%variance, eps))) * w + b
    """

    name: ClassVar[str] = "batch_statistics"

    def __call__(self, graph: Graph) -> Graph:
        if graph.batch_symbol is None:
            return graph
        counts = Counts(graph.clone())
        notes: list[str] = []
        for node in list(counts.graph.graph.nodes):
            if _takes_statistics(node):
                notes += _rewrite(node, counts)
        result = counts.graph.with_note(*notes)
        drop_dead_nodes(result.graph)
        return result


def _takes_statistics(node: fx.Node) -> bool:
    return node.target in (FUNCTIONAL, PLAIN) and bool(node.args[5])


def _rewrite(node: fx.Node, counts: Counts) -> list[str]:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    sizes = meta.shape(source)
    number: Any = 1
    for dim in (0, *range(2, len(sizes))):
        number = number * meta.expression(sizes[dim])
    count = counts.of_size(node, number)
    if count is None:
        where = meta.source_line(node)
        return [f"batch norm at {where} takes its statistics locally: its count is not proportional to the rows"]
    _BatchNorm(node, source, count).rewrite()
    return []


class _BatchNorm:
    """One batch norm, written out."""

    def __init__(self, node: fx.Node, source: fx.Node, count: fx.Node) -> None:
        self.node = node
        rank = len(meta.shape(source))
        self.dims = [0, *range(2, rank)]
        self.per_channel = [-1, *[1] * (rank - 2)]
        self.dtype = meta.dtype(source)
        self.source = self._cast(source, self._working_dtype())
        self.count = self._cast(count, self._working_dtype())

    def _working_dtype(self) -> torch.dtype:
        return sum_dtype(self.dtype)

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
        typed = self._cast(channels, self._working_dtype())
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
        return value if meta.dtype(value) == dtype else self._op(aten.to.dtype, value, dtype)

    def _op(self, target: Any, *args: Any) -> fx.Node:
        return insert(self.node, target, *args)
