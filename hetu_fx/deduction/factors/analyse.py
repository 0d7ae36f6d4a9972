"""Work out the factor classes of a graph: the model's own list of parallel dimensions.

Every dim of every tensor consists of factors. Each op's rule relates factors of its operands and results;
all of them are unified over the graph, and a factor is refined into sub-factors wherever a dim meets a
product (a reshape, grouped heads, a fused projection that is cut later). Near-linear in the number of
nodes.

`_factor_ops` sees each op node as its rule does; extraction and unification go over what it returns.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from hetu_fx.base.user_warnings import warn_user
from hetu_fx.deduction.factors.dual_roles import taken_apart
from hetu_fx.deduction.factors.factors import (
    ClassDim,
    ClassDims,
    FactorClass,
    FactorMap,
    OperandFactors,
    OpFactors,
    SizeArg,
)
from hetu_fx.deduction.factors.row_order import Routing, find_routing
from hetu_fx.deduction.rules.build import opaque
from hetu_fx.deduction.rules.call import Call, read_call
from hetu_fx.deduction.rules.forms import NO_TRAITS, OpTraits
from hetu_fx.deduction.rules.partition import Partition
from hetu_fx.deduction.rules.registry import find_rule
from hetu_fx.deduction.rules.rule import Factoring, factor_names
from hetu_fx.deduction.rules.size import Size, recorded_size
from hetu_fx.errors import RuleError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind

FactorDims = tuple[tuple[int, ...], ...]


def analyse(graph: Graph, only: Collection[fx.Node] | None = None) -> FactorMap:
    """Return the factor classes of a graph and what each op does to them.

    `only` of these nodes, where they are given; all that they are made of must be among them.
    An op without a rule keeps everything whole, with an UnknownOpWarning that names it and the user's line.
    """
    nodes = [node for node in graph.graph.nodes if only is None or node in only]
    steps, routing = _factor_ops(graph, nodes)
    analysis = _Analysis(graph)
    for node in nodes:
        analysis.visit(node, steps.get(node))
    return _Extraction(graph, analysis, steps).factor_map(routing)


@dataclass(slots=True)
class _Bound:
    """The factors of the graph that a step's names stand for, and those that could not be unified."""

    factors: dict[str, int]
    misfits: list[int]


class _Analysis:
    """The state of one analysis: the partition, and the factors of each node's dims."""

    def __init__(self, graph: Graph) -> None:
        self.partition = Partition()
        self.dims: dict[fx.Node, tuple[FactorDims, ...]] = {}
        self.bound: dict[fx.Node, _Bound] = {}
        self._graph = graph
        self._inputs = {leaf.node for leaf in graph.leaves_of(LeafKind.INPUT)}
        self._rows = None if graph.batch_symbol is None else Size(1, ((str(graph.batch_symbol), 1),))
        self._batch: int | None = None

    def visit(self, node: fx.Node, step: FactoredOp | None) -> None:
        """Take one node into account; its inputs have been visited."""
        if step is not None:
            self._bind(node, step)
        elif node.target is operator.getitem and node.args[0] in self.dims:
            self.dims[node] = (self._item(node),)
        elif node.op in ("placeholder", "get_attr") and meta.is_tensor(node):
            self.dims[node] = (tuple(self._fresh(node, recorded_size(size)) for size in meta.shape(node)),)

    def _fresh(self, node: fx.Node, size: Size) -> tuple[int, ...]:
        if size.number == 1:
            return ()
        if node not in self._inputs or size != self._rows:
            return (self.partition.new(size),)
        if self._batch is None:
            self._batch = self.partition.new(size)
        return (self._batch,)

    def _item(self, node: fx.Node) -> FactorDims:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        items = meta.value(source)
        before = [item for item in items[: index % len(items)] if isinstance(item, torch.Tensor)]
        return self.dims[source][len(before)]

    def _bind(self, node: fx.Node, step: FactoredOp) -> None:
        sizes = _sizes(step)
        factors = {name: self.partition.new(size) for name, size in sizes.items()}
        bound = _Bound(factors, [])
        for position, (operand, dims) in enumerate(zip(step.call.operands, step.factoring.operands, strict=True)):
            if position not in step.factoring.unread:
                self._relate(operand.source, dims, bound)
        self.dims[node] = tuple(
            tuple(tuple(factors[name] for name in dim) for dim in dims) for dims in step.factoring.results
        )
        self.bound[node] = bound

    def _relate(self, source: fx.Node, dims: tuple[tuple[str, ...], ...], bound: _Bound) -> None:
        for given, dim in zip(self.dims[source][0], dims, strict=True):
            bound.misfits.extend(self.partition.unify(given, [bound.factors[name] for name in dim]))


def _sizes(step: FactoredOp) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    call, factoring = step.call, step.factoring
    shapes = [*(operand.shape for operand in call.operands), *call.results]
    for shape, dims in zip(shapes, (*factoring.operands, *factoring.results), strict=True):
        for size, dim in zip(shape, dims, strict=True):
            for name in dim:
                sizes.setdefault(name, factoring.sizes.get(name, size))
    return sizes


class _Extraction:
    """Turns the finished partition into classes: numbers them, and reads off what each op does to them."""

    def __init__(self, graph: Graph, analysis: _Analysis, steps: Mapping[fx.Node, FactoredOp]) -> None:
        self._graph, self._analysis, self._steps = graph, analysis, steps
        self._classes: dict[int, FactorClass] = {}

    def factor_map(self, routing: Routing) -> FactorMap:
        """Return the analysis as values."""
        dims = {
            node: tuple(tuple(self._classes_of(dim) for dim in tensor) for tensor in tensors)
            for node, tensors in self._analysis.dims.items()
        }
        ops = {node: self._op(node, step, dims) for node, step in self._steps.items()}
        ops.update({node: _item_op(node, dims) for node in dims if node.target is operator.getitem})
        return FactorMap(
            classes=tuple(self._classes.values()),
            repeated=frozenset(cls for tensors in dims.values() for tensor in tensors for cls in _twice(tensor)),
            pinned=frozenset(
                cls for node, step in self._steps.items() for cls in self._named(node, step.factoring.pinned)
            ),
            shard_ordered=routing.shard_ordered,
            leaves=self._graph.leaves,
            _dims=dims,
            _ops=ops,
        )

    def _classes_of(self, factors: Iterable[int]) -> ClassDim:
        return tuple(self._class(atom) for atom in self._analysis.partition.atoms(factors))

    def _class(self, atom: int) -> FactorClass:
        if atom not in self._classes:
            size = self._analysis.partition.size(atom)
            is_batch = atom in self._batch_atoms() or size == self._analysis._rows
            self._classes[atom] = FactorClass(len(self._classes), size.number, is_batch, str(size), size.hint)
        return self._classes[atom]

    def _batch_atoms(self) -> tuple[int, ...]:
        batch = self._analysis._batch
        return () if batch is None else self._analysis.partition.atoms((batch,))

    def _named(self, node: fx.Node, names: Iterable[str]) -> frozenset[FactorClass]:
        return frozenset(self._in_order(node, names))

    def _op(self, node: fx.Node, step: FactoredOp, dims: Mapping[fx.Node, tuple[ClassDims, ...]]) -> OpFactors:
        factoring = step.factoring
        whole = self._whole(node, step)
        results = frozenset(cls for tensor in dims[node] for dim in tensor for cls in dim)
        reduced = self._named(node, factoring.reduced) - whole - results
        op = OpFactors(
            operands=tuple(OperandFactors(op.source, op.path, dims[op.source][0]) for op in step.call.operands),
            results=dims[node],
            reduced=reduced,
            whole=whole,
            linear=factoring.linear,
            additive=factoring.additive,
            averaged=self._named(node, factoring.averaged) & reduced,
            counted=factoring.counted,
            unread=factoring.unread,
            size_args=tuple(SizeArg(lit.path, self._in_order(node, lit.names)) for lit in factoring.literals),
            random=factoring.random,
            known=step.known,
            sharded=self._named(node, factoring.sharded) - whole,
            travelling=self._travelling(node, factoring),
            traits=step.traits,
        )
        return replace(op, apart=self._apart(node, op, factoring)) if whole & results else op

    def _apart(self, node: fx.Node, op: OpFactors, factoring: Factoring) -> Mapping[FactorClass, OpFactors]:
        bound = self._analysis.bound[node]
        parts = {name: self._in_order(node, (name,)) for name in bound.factors}
        return taken_apart(op, factoring, parts, frozenset(self._classes_of(bound.misfits)))

    def _travelling(self, node: fx.Node, factoring: Factoring) -> Mapping[int, FactorClass]:
        """Return the class of each operand that may travel, where its factor is not refined."""
        given = {position: self._in_order(node, (name,)) for position, name in factoring.travelling.items()}
        return {position: classes[0] for position, classes in given.items() if len(classes) == 1}

    def _in_order(self, node: fx.Node, names: Iterable[str]) -> ClassDim:
        factors = self._analysis.bound[node].factors
        return self._classes_of(factors[name] for name in names)

    def _whole(self, node: fx.Node, step: FactoredOp) -> frozenset[FactorClass]:
        """Return the classes that the rule keeps whole, that misfit, or that play two parts in the op.

        So do those of a sharded factor that the graph refines: a part of one is no range of indices.
        """
        factoring, bound = step.factoring, self._analysis.bound[node]
        read = [dims for i, dims in enumerate(factoring.operands) if i not in factoring.unread]
        used = factor_names((*read, *factoring.results))
        parts = Counter(cls for name in used for cls in self._classes_of((bound.factors[name],)))
        doubled = frozenset(cls for cls, count in parts.items() if count > 1)
        refined = (name for name in factoring.sharded if len(self._in_order(node, (name,))) > 1)
        stay = self._named(node, (*factoring.whole, *factoring.placed, *refined))
        return stay | frozenset(self._classes_of(bound.misfits)) | doubled


def _twice(tensor: ClassDims) -> frozenset[FactorClass]:
    counts = Counter(cls for dim in tensor for cls in dim)
    return frozenset(cls for cls, count in counts.items() if count > 1)


def _item_op(node: fx.Node, dims: Mapping[fx.Node, tuple[ClassDims, ...]]) -> OpFactors:
    """Return the factors of taking one result of an op: it passes everything on."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    operand = OperandFactors(source, (0,), dims[node][0])
    return OpFactors((operand,), dims[node], linear=(frozenset({0}),))


class UnknownOpWarning(UserWarning):
    """An op has no rule (or one that does not fit): it runs on whole tensors, correct but slow."""


@dataclass(frozen=True, slots=True)
class FactoredOp:
    """An op node with its call and the factors of it."""

    call: Call
    factoring: Factoring
    known: bool
    traits: OpTraits


def _factor_ops(graph: Graph, nodes: Iterable[fx.Node]) -> tuple[Mapping[fx.Node, FactoredOp], Routing]:
    """Ask the rules of the ops among `nodes` for their factors, and what routes rows among them; see `analyse`."""
    told: set[str] = set()
    steps: dict[fx.Node, FactoredOp] = {}
    for node in filter(_is_tensor_op, nodes):
        steps[node] = _step(read_call(node), node, told)
    unseen = {node for node in graph.graph.nodes if node not in steps and _is_tensor_op(node)}
    routing = find_routing(graph.graph, {node: (step.call, step.factoring) for node, step in steps.items()}, unseen)
    for node, call in routing.calls.items():
        steps[node] = _step(call, node, told)
    return steps, routing


def _is_tensor_op(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    reads = any(meta.has_tensor(source) for source in node.all_input_nodes)
    return meta.has_tensor(node) or (reads and "sym_" not in str(node.target))


def _step(call: Call, node: fx.Node, told: set[str]) -> FactoredOp:
    rule = find_rule(node.target)
    problem = "has no rule"
    if rule is not None:
        try:
            return FactoredOp(call, rule.factor(call), True, rule.traits)
        except RuleError as error:
            problem = f"has a rule that does not fit: {error}"
    if call.op not in told:
        told.add(call.op)
        warn_user(
            f"op {call.op} {problem}; it runs on whole tensors, correct but slow ({call.where})"
            "\nhint: tell how its dims relate with hetu_fx.register_rule",
            UnknownOpWarning,
            meta.source_frame(node),
            same_on_all_ranks=True,
        )
    return FactoredOp(call, opaque(call), False, NO_TRAITS if rule is None else rule.traits)
