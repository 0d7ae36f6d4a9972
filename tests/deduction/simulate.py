"""Run a captured graph on simulated ranks with one factor class cut, as its factor map says, beside the whole run.

Every value is held by each rank as its shard, as a copy, or as a summand; after each op, what the ranks hold is put
together and compared with the single-device value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from hetu_fx.deduction.factors.factors import ClassDims, FactorClass, FactorMap, OpFactors
from hetu_fx.graph.graph import Graph
from tests.deduction.shards import Cut

IGNORED = -100


@dataclass(frozen=True)
class Local:
    """What the ranks hold of one value: `kind` is "copy", "shard" or "summand"."""

    kind: str
    parts: tuple[Any, ...]


class Simulation:
    """Runs node by node; `whole` are the single-device values, `local` what the ranks hold."""

    def __init__(self, graph: Graph, factors: FactorMap, cls: FactorClass, cuts: list[Cut]) -> None:
        self.graph, self.factors, self.cls, self.cuts = graph, factors, cls, cuts
        self.whole: dict[fx.Node, Any] = {}
        self.local: dict[fx.Node, Local] = {}
        self.steps: set[str] = set()

    def run(self, leaves: list[torch.Tensor]) -> None:
        for leaf, value in zip(self.graph.leaves, leaves, strict=True):
            self.whole[leaf.node] = value
            self.local[leaf.node] = self.shard(value, self.factors.dims(leaf.node))
        for node in self.graph.graph.nodes:
            if node.op == "call_function":
                self.step(node)

    def step(self, node: fx.Node) -> None:
        args, kwargs = tree_map(self.whole_value, (node.args, node.kwargs))
        self.whole[node] = node.target(*args, **kwargs)
        if not self.factors.is_op(node):
            self.local[node] = self.number(node)
            return
        op = self.factors.op(node)
        self.local[node] = self.on_shards(node, op) if self.is_cut(op) else self.on_copies(node, op)
        self.check(node)

    def whole_value(self, item: Any) -> Any:
        return self.whole[item] if isinstance(item, fx.Node) else item

    def number(self, node: fx.Node) -> Local:
        """Compute sizes from what each rank holds."""
        parts = []
        for rank in range(len(self.cuts)):
            args = tree_map(lambda i, r=rank: self.local[i].parts[r] if isinstance(i, fx.Node) else i, node.args)
            parts.append(node.target(*args))
        return Local("copy", tuple(parts))

    def is_cut(self, op: OpFactors) -> bool:
        read = [o.dims for i, o in enumerate(op.operands) if i not in op.unread]
        stays = op.whole | op.sharded  # the forms of sharded factors have tests of their own
        return self.cls not in stays and any(has(dims, self.cls) for dims in (*read, *op.results))

    def on_copies(self, node: fx.Node, op: OpFactors) -> Local:
        """Run on whole operands; summands pass where the op is linear."""
        summands = {i for i, operand in enumerate(op.operands) if self.local[operand.node].kind == "summand"}
        if summands and frozenset(summands) in op.linear and self.cls not in op.whole:
            return Local("summand", self.run_ranks(node, op, {}))
        whole = self.whole[node]
        if isinstance(whole, torch.Tensor):
            return self.shard(whole, op.results[0])
        items = [self.shard(value, dims) for value, dims in zip(whole, op.results, strict=True)]
        kind = "shard" if any(item.kind == "shard" for item in items) else "copy"
        return Local(kind, tuple(zip(*(item.parts for item in items), strict=True)))

    def on_shards(self, node: fx.Node, op: OpFactors) -> Local:
        self.steps.add(str(node.target))
        changes = {
            i: self.gathered(operand.node)
            for i, operand in enumerate(op.operands)
            if self.local[operand.node].kind == "summand" and i not in op.counted
        }
        results = self.run_ranks(node, op, changes)
        summed = self.cls in op.reduced
        if summed and self.cls in op.averaged:
            results = tuple(w * r for w, r in zip(self.weights(op), results, strict=True))
        return Local("summand" if summed else "shard", results)

    def weights(self, op: OpFactors) -> list[float]:
        """Return each rank's share of the mean: of targets that are not ignored, or of elements."""
        targets = [o for o in op.operands[1:2] if not self.whole[o.node].is_floating_point()]
        if not targets:
            return [(cut[1] - cut[0]) / self.cuts[-1][1] for cut in self.cuts]
        counts = [int((part != IGNORED).sum()) for part in self.local[targets[0].node].parts]
        return [count / sum(counts) for count in counts]

    def gathered(self, node: fx.Node) -> tuple[Any, ...]:
        return (self.whole[node],) * len(self.cuts)

    def run_ranks(self, node: fx.Node, op: OpFactors, changes: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(self.run_rank(node, op, changes, rank) for rank in range(len(self.cuts)))

    def run_rank(self, node: fx.Node, op: OpFactors, changes: dict[int, tuple[Any, ...]], rank: int) -> Any:
        values = {operand.path: changes[i][rank] for i, operand in enumerate(op.operands) if i in changes}
        args, kwargs = tree_map(lambda i: self.at(i, rank), (list(node.args), dict(node.kwargs)))
        for size_arg in op.size_args:
            given = item_at(node, size_arg.path)
            if isinstance(given, int) and given != -1 and self.cls in size_arg.classes:
                values[size_arg.path] = math.prod(self.size(cls, rank) for cls in size_arg.classes)
        for position in op.additive:
            if rank and self.cls in op.reduced and not has(op.operands[position].dims, self.cls):
                operand = op.operands[position]
                values[operand.path] = torch.zeros_like(self.whole[operand.node])
        for path, value in values.items():
            put(args if isinstance(path[0], int) else kwargs, path, value)
        return node.target(*args, **kwargs)

    def at(self, item: Any, rank: int) -> Any:
        return self.local[item].parts[rank] if isinstance(item, fx.Node) else item

    def size(self, cls: FactorClass, rank: int) -> int:
        cut = self.cuts[rank]
        assert cls.size is not None or cls == self.cls
        return cut[1] - cut[0] if cls == self.cls else int(cls.size or 0)

    def shard(self, value: torch.Tensor, dims: ClassDims) -> Local:
        """Cut a whole value; it is a copy where it lacks the class."""
        parts = tuple(take(value, dims, self.cls, cut, self.cuts[-1][1]) for cut in self.cuts)
        return Local("shard" if has(dims, self.cls) else "copy", parts)

    def check(self, node: fx.Node) -> None:
        """Compare what the ranks hold together with the single-device value, where rows keep their order."""
        whole, local = self.whole[node], self.local[node]
        unknown = node in self.factors.shard_ordered or "empty" in str(node.target)
        if unknown or not isinstance(whole, torch.Tensor) or local.kind == "copy":
            return
        if local.kind == "summand":
            self.same(sum(local.parts), whole, node)
            return
        for part, cut in zip(local.parts, self.cuts, strict=True):
            self.same(part, take(whole, self.factors.dims(node), self.cls, cut, self.cuts[-1][1]), node)

    def same(self, found: Any, expected: torch.Tensor, node: fx.Node) -> None:
        what = f"{node.name} ({node.target}) with {self.cls} cut at {self.cuts}"
        assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} for {tuple(expected.shape)}"
        tolerance = 1e-10 if expected.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(
            found.to(expected.dtype),
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )


def has(dims: ClassDims, cls: FactorClass) -> bool:
    return any(cls in dim for dim in dims)


def take(value: torch.Tensor, dims: ClassDims, cls: FactorClass, cut: Cut, size: int) -> torch.Tensor:
    """Return the shard of a value; sizes beside the class follow from the value where they are symbolic."""
    for dim, classes in enumerate(dims):
        if cls in classes:
            at = classes.index(cls)
            inner = math.prod(other.hint for other in classes[at + 1 :])
            view = value.unflatten(dim, (-1, size, inner))
            return view.narrow(dim + 1, cut[0], cut[1] - cut[0]).flatten(dim, dim + 2)
    return value


def item_at(node: fx.Node, path: tuple[int | str, ...]) -> Any:
    value: Any = node.args if isinstance(path[0], int) else node.kwargs
    for step in path:
        value = value[step] if not isinstance(value, dict) or step in value else None
    return value


def put(container: Any, path: tuple[int | str, ...], value: Any) -> None:
    for step in path[:-1]:
        container[step] = list(container[step])
        container = container[step]
    container[path[-1]] = value
