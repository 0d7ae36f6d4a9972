"""The HAP problem of a captured graph, and where its ops and tensors are in the graph.

It is made of the graph, its op rules, and its example batch. Every value that parameters reach is a tensor of it, its
dims the factor classes of the model's dims (see `hetu_fx.deduction.factors.factors`); all else is at hand on every
device, like the batch itself. Views that only rearrange dims are no ops: their readers read what they are views of.
Work is counted as `hetu_fx.planner.count.count` counts it, memory traffic included.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.once import once
from hetu_fx.base.torch_private import has_schema, tree_leaves
from hetu_fx.cluster.devices import FLOPS_PER_BYTE
from hetu_fx.deduction.factors.factors import ClassDims, FactorClass, FactorMap, OpFactors, flat
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import is_view
from hetu_fx.graph.edit import ancestors
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.planner.count.count import FlopCounter, example_rows
from hetu_fx.planner.count.product_ops import multiplies
from hetu_fx.planner.values.tensor_program import Factors, Kind, Op, Tensor, TensorProgram
from hetu_fx.transforms.layouts.analysed_graph import AnalysedGraph
from hetu_fx.transforms.layouts.program_choices import can_cut, only_rearranges, sends_factors


@dataclass(frozen=True, eq=False)
class GraphProblem:
    """The HAP problem of a training step of a captured model, and its place in the graph.

    Attributes:
        program: the problem.
        analysed: the graph that it is made of.
        nodes: of each op.
        sources: the tensor that a value is (a view of), with that tensor's classes; values that are none are not there.
    """

    program: TensorProgram
    analysed: AnalysedGraph
    nodes: tuple[fx.Node, ...]
    sources: Mapping[fx.Node, tuple[str, ClassDims]]


def graph_problem_of(
    analysed: AnalysedGraph, *, rows: int | None = None, segment_per_part: bool = False
) -> GraphProblem:
    """Return the HAP problem of a training step of a captured model.

    Args:
        analysed: the model; sizes are those of its example batch.
        rows: rows of the step's whole batch; None: as many as the example has.
        segment_per_part: whether what stands before the repeated blocks, the blocks, and what stands after
            them may have ratios of their own.

    Raises `PlanError` for a graph without anything that parameters reach.
    """
    of_example = example_rows(analysed.graph)
    scale = (rows or of_example) / of_example
    reader = _ProblemReader(analysed.graph, analysed.factors, scale, segment_per_part)
    for node in reader.wanted():
        reader.add(node)
    outputs = tuple(dict.fromkeys(reader.source_of(node)[0] for node in reader.outputs()))
    if not reader.ops:
        raise PlanError("no value of the graph depends on a parameter, so there is nothing to spread over devices")
    program = TensorProgram(tuple(reader.tensors.values()), tuple(reader.ops), outputs, tuple(reader.blocks()))
    return GraphProblem(program, analysed, tuple(reader.nodes), reader.sources)


@dataclass
class _ProblemReader:
    """The problem while the graph is read."""

    graph: Graph
    factors: FactorMap
    scale: float
    segment_per_part: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    sources: dict[fx.Node, tuple[str, ClassDims]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counter = FlopCounter(self.factors)
        self._parameters = {leaf.node: leaf.name for leaf in self.graph.leaves_of(LeafKind.PARAMETER)}
        self._learned = set(self._parameters)
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and not self._learned.isdisjoint(node.all_input_nodes):
                self._learned.add(node)

    def outputs(self) -> list[fx.Node]:
        """Return the loss, or all values if there is none, as far as parameters reach them."""
        kinds = (OutputKind.LOSS, OutputKind.VALUE)
        found = [[node for _, node in self.graph.outputs_of(kind)] for kind in kinds]
        return [node for node in found[0] or found[1] if node in self._learned]

    def wanted(self) -> Iterator[fx.Node]:
        """Yield the ops that the outputs need and parameters reach, in order."""
        needed = ancestors(self.outputs(), lambda node: self._learned.intersection(node.all_input_nodes))
        yield from (node for node in self.graph.graph.nodes if node in needed and node.op == "call_function")

    def add(self, node: fx.Node) -> None:
        """Take an op into the problem, or as a view of its operand."""
        if not meta.has_tensor(node) or not self.factors.is_op(node):
            return
        op = self.factors.op(node)
        if node.target is operator.getitem:
            self.sources[node] = self._item(node)
            return
        if only_rearranges(node, op):
            self.sources[node] = self.source_of(op.operands[0].node)
            return
        reads = [self.source_of(operand.node) for operand in op.operands]
        makes = [self._make(node, number, dims) for number, dims in enumerate(op.results)]
        flops = self._flops(node, op)
        self.ops.append(
            Op(
                name=node.name,
                reads=tuple(name for name, _ in reads),
                makes=tuple(makes),
                operands=tuple(_names(dims) for _, dims in reads),
                results=tuple(map(_names, op.results)),
                flops=flops,
                backward_flops=_backward(op, flops),
                whole=frozenset(map(factor_name, self._whole(node, op))),
                linear=op.linear,
                unread=op.unread | op.counted,
                segment=self._segment(node),
                moves=not self._product_flops(node),
                sends_factors=frozenset(map(factor_name, sends_factors(node, op))),
            )
        )
        self.nodes.append(node)

    def source_of(self, node: fx.Node) -> tuple[str, ClassDims]:
        """Return the tensor that a node's value is (a view of), with that tensor's classes; add a leaf."""
        if node in self.sources:
            return self.sources[node]
        dims = self.factors.dims(node)
        kind: Kind = "parameter" if node in self._parameters else "value" if node in self._learned else "input"
        if (name := self._parameters.get(node, node.name)) not in self.tensors:
            self._add_tensor(name, node, dims, meta.value(node).element_size(), kind)
        self.sources[node] = name, dims
        return name, dims

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of ops of the repeated blocks, up to one whose ops stand among others'."""
        owners = [self.graph.block_of(node) for node in self.nodes]
        for block in range(self.graph.num_blocks):
            own = [index for index, owner in enumerate(owners) if owner == block]
            if own and {owner for owner in owners[own[0] : own[-1] + 1]} <= {block, None}:
                yield own[0], own[-1] + 1

    def _item(self, node: fx.Node) -> tuple[str, ClassDims]:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        if source not in self._learned:
            return self.source_of(node)
        before = [item for item in meta.value(source)[:index] if isinstance(item, torch.Tensor)]
        return _result_name(source, len(before)), self.factors.dims(node)

    def _make(self, node: fx.Node, number: int, dims: ClassDims) -> str:
        tensors = [item for item in tree_leaves(meta.value(node)) if isinstance(item, torch.Tensor)]
        name = node.name if len(tensors) == 1 else _result_name(node, number)
        size, is_float = tensors[number].element_size(), carries_gradient(tensors[number].dtype)
        self._add_tensor(name, node, dims, size, "value", is_float)
        if len(tensors) == 1:
            self.sources[node] = name, dims
        return name

    def _add_tensor(
        self, name: str, node: fx.Node, dims: ClassDims, element_bytes: int, kind: Kind, is_float: bool = True
    ) -> None:
        classes = flat(dims)
        self.tensors[name] = Tensor(
            name=name,
            shape=tuple(map(self._size, classes)),
            kind=kind,
            element_bytes=element_bytes,
            has_gradient=is_float,
            is_kept=self._is_kept(node),
            movable=node not in self.factors.shard_ordered,
            origin=tuple(dim for dim, found in enumerate(dims) for _ in found),
            row_dim=next((i for i, cls in enumerate(classes) if cls.is_batch), None),
        )

    def _is_kept(self, node: fx.Node) -> bool:
        """Tell whether a product makes or reads the value: what min-cut rematerialisation keeps, near enough."""
        ends = [node, *node.users, *(user for view in node.users if view in self.sources for user in view.users)]
        return any(end.op == "call_function" and self._product_flops(end) > 0 for end in ends)

    def _size(self, cls: FactorClass) -> int:
        size = cls.size or cls.hint
        return max(1, round(size * self.scale)) if cls.is_batch else max(1, size)

    def _whole(self, node: fx.Node, op: OpFactors) -> Iterable[FactorClass]:
        """Return classes that may not be cut: also those that a form of the op's own would be needed for.

        One that no result has is summed up in that form, at the price of a few numbers.
        """
        made = {cls for dims in op.results for cls in flat(dims)}
        fixed = {cls for cls in op.classes if not can_cut(node, cls, self.factors)}
        return op.whole | (op.sharded & made) | fixed

    def _flops(self, node: fx.Node, op: OpFactors) -> float:
        flops = self._product_flops(node)
        if not flops and not is_view(node):
            return self._moved_bytes(op) * FLOPS_PER_BYTE
        return flops * self._scale(op)

    def _moved_bytes(self, op: OpFactors) -> float:
        """Return what an op reads and makes; of a table that is looked up, no more is read than is made."""
        made = sum(self._bytes(dims) for dims in op.results)
        read = [self._bytes(operand.dims) for operand in op.operands]
        return made + sum(min(n, made) if i in op.traits.vanishing else n for i, n in enumerate(read))

    def _bytes(self, dims: ClassDims) -> float:
        return 4.0 * math.prod(map(self._size, flat(dims)))

    @once
    def _product_flops(self, node: fx.Node) -> float:
        """Return the FLOPs of a product; 0 for other ops.

        One that torch cannot count has those of its rule, if they take longer than what it moves.
        """
        if not meta.has_tensor(node) or not has_schema(node.target):
            return 0.0
        known = float(self._counter.flops(node))
        if known or not multiplies(node, self.factors):
            return known
        op, by_rule = self.factors.op(node), self._counter.by_rule(node)
        return by_rule if by_rule * self._scale(op) > self._moved_bytes(op) * FLOPS_PER_BYTE else 0.0

    def _scale(self, op: OpFactors) -> float:
        """Return how many times the example's work an op does."""
        return self.scale if any(cls.is_batch for cls in op.classes) else 1.0

    def _segment(self, node: fx.Node) -> int:
        if not self.segment_per_part or not self.graph.num_blocks:
            return 0
        if self.graph.block_of(node) is not None:
            return 1
        return 0 if self.graph.position(node) < self.graph.num_blocks - 1 else 2


def _backward(op: OpFactors, flops: float) -> tuple[float, ...]:
    """Return the work of operands' gradients: twice the forward's, shared by those that are multiplied.

    Numbers of rows or experts have none.
    """
    of_floats = [i for i, operand in enumerate(op.operands) if carries_gradient(meta.dtype(operand.node))]
    sharing = [i for i in of_floats if i not in op.additive]
    return tuple(2 * flops / len(sharing) if i in sharing else 0.0 for i in range(len(op.operands)))


def _result_name(node: fx.Node, number: int) -> str:
    return f"{node.name}[{number}]"


def factor_name(cls: FactorClass) -> str:
    """Return what the problem calls a factor class."""
    return f"#{cls.id}"


def _names(dims: ClassDims) -> Factors:
    return tuple(map(factor_name, flat(dims)))
