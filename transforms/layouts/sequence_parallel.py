"""Sequence parallelism: what a tensor-parallel group does with ops that cannot split one of the model's own classes.

Between the projections of a transformer's block (norms, residuals, dropout) every device would do the same. Each does
a part of the sequence instead (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
section 4.2.2): the sum after a projection comes out in parts, and the next projection gathers them. In the backward
each of the two does what the other does in the forward; the gradients of what all parts read, a norm's weight, are
summands.

Nothing here knows what a sequence is. It is the classes that products with parameters carry along: those of the result
that the parameter lacks, but for the rows of the batch. Their lengths may be symbolic, and parts of them empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from hetu_fx.annotations.states import proportional_sizes
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, SizeArg
from hetu_fx.deduction.rules.call import argument_at
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph
from hetu_fx.transforms.layouts.flow import Flow, reached_from

Classes = frozenset[FactorClass]
NOTHING: Classes = frozenset()


def sequence_classes(graph: Graph, factors: FactorMap, flow: Flow, taken: Classes) -> Classes:
    """Return the classes that products of activations and parameters carry along, without rows and those `taken`."""
    found: set[FactorClass] = set()
    for node in graph.graph.nodes:
        if factors.is_op(node) and meta.is_tensor(node) and flow.is_mixed(node):
            found |= _carried(factors.op(node), flow)
    return frozenset(c for c in found - taken if not c.is_batch and c not in factors.pinned)


def _carried(op: OpFactors, flow: Flow) -> Classes:
    """Return what the result of a product with a parameter has from the other operand alone."""
    weights = [o.classes for o in op.operands if not flow.through_inputs(o.node)]
    others = [o.classes for o in op.operands if flow.through_inputs(o.node)]
    contracted = [w for w in weights if any(w & other & op.reduced - op.sharded for other in others)]
    result = frozenset(c for dims in op.results for dim in dims for c in dim)
    return (result - op.whole).difference(*contracted) if contracted else NOTHING


def shares(factor: FactorClass, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Return each device's part of a sequence, or its share in one whose length only the run tells."""
    return ratios if factor.size is None else proportional_sizes(factor.size, ratios)


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """Which ops may run on a part of a sequence.

    Attributes:
        ops: by op, the classes that it may run on a part of.
        joined: values that others than the stage's ops read: each device must have them whole.
        is_asked: the plan asks for the parts, to have less work, so that no op may run on the whole for a better price.
        rings: ops of which operands travel in parts, where they run on a part.
    """

    ops: Mapping[fx.Node, Classes] = field(default_factory=dict)
    joined: frozenset[fx.Node] = frozenset()
    is_asked: bool = False
    rings: frozenset[fx.Node] = frozenset()

    def of(self, node: fx.Node) -> Classes:
        """Return the classes that an op may run on a part of."""
        return self.ops.get(node, NOTHING)


UNCUT = SequenceCut()


def sequence_cut(annotated: AnnotatedGraph, excluded: frozenset[fx.Node], outside: frozenset[fx.Node]) -> SequenceCut:
    """Return what may be cut under a plan, without the ops that are `excluded`; values read `outside` are joined."""
    if not annotated.plan.sequence_parallel:
        return UNCUT
    able = activations(annotated.graph, annotated.factors, annotated.flow) - excluded
    return SequenceCut({node: _cuttable(node, annotated) for node in able}, outside)


def activations(graph: Graph, factors: FactorMap, flow: Flow) -> frozenset[fx.Node]:
    """Return the ops that batch and parameters both reach, the latter by tensors; masks have but sizes of them."""

    def tensors(node: fx.Node) -> list[fx.Node]:
        return [operand.node for operand in factors.op(node).operands] if factors.is_op(node) else []

    parameters = [leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER)]
    reached = reached_from(graph, parameters, tensors)
    return frozenset(node for node in reached if node.op == "call_function" and flow.through_inputs(node))


def _cuttable(node: fx.Node, annotated: AnnotatedGraph) -> Classes:
    op = annotated.factors.op(node)
    if stands_alone(node, annotated.factors):
        return NOTHING
    read = [o for i, o in enumerate(op.operands) if i not in op.unread]
    given = frozenset(c for o in read for c in o.classes)
    dims = [dim for dims in (*op.results, *(o.dims for o in read)) for dim in dims]
    candidates = (annotated.sequence & given) - op.whole - op.sharded - op.averaged
    alone = {c for c in candidates if all(dim == (c,) for dim in dims if c in dim)}
    return frozenset(c for c in alone if _sizes_can_be_told(node, op, c))


def stands_alone(node: fx.Node, factors: FactorMap) -> bool:
    """Tell whether an op must run as it is: it draws, counts rows, or has them in an order of their own."""
    op = factors.op(node)
    return op.random or bool(op.counted) or not factors.shard_ordered.isdisjoint((node, *node.all_input_nodes))


def named_sizes(node: fx.Node, op: OpFactors) -> list[tuple[object, SizeArg]] | None:
    """Return the sizes that a call names, with their classes; None if it names others that no class explains."""
    named = [argument_at(node, size.path) for size in op.size_args]
    explained = {*(o.node for o in op.operands), *(given for given in named if isinstance(given, fx.Node))}
    return list(zip(named, op.size_args, strict=True)) if explained.issuperset(node.all_input_nodes) else None


def _sizes_can_be_told(node: fx.Node, op: OpFactors, factor: FactorClass) -> bool:
    """Tell whether each size that the call names can be written for a part of `factor`."""
    named = named_sizes(node, op)
    return named is not None and all(_is_told(given, size, factor) for given, size in named)


def _is_told(given: object, size: SizeArg, factor: FactorClass) -> bool:
    """Tell whether a size is the sequence's own, or has nothing to do with it; -1 is ambiguous beside an empty part."""
    if size.classes == (factor,):
        return True
    return factor not in size.classes and (given != -1 or all(c.size is not None for c in size.classes))
