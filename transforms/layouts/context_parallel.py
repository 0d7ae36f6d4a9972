"""Context parallelism: a stage whose devices share the sequence throughout, attention included.

Every op on activations runs on its device's part of the tokens. An op in which the sequence plays two parts is cut in
the first (see `hetu_fx.deduction.factors.dual_roles`): attention computes the part's queries against all keys and
values, which are gathered once per layer (Dubey et al., The Llama 3 Herd of Models, section 3.3.2); in the backward
their gradients are reduced and scattered. Or they stay in parts that go round (see
`hetu_fx.transforms.layouts.deduce`). The devices hold all parameters, and each has a summand of their gradients.

Nothing here knows what attention is: what is read whole by all its readers is put together where it is smallest, and
what depends on inputs alone (positions, masks, labels) is computed for a part where that is all that is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from hetu_fx.deduction.factors.dual_roles import original
from hetu_fx.deduction.factors.factors import FactorClass, OperandFactors, OpFactors, SizeArg
from hetu_fx.errors import PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import LeafKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, stage_nodes
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.flow import is_item, linear_source, reached_from
from hetu_fx.transforms.layouts.sequence_parallel import (
    NOTHING,
    Classes,
    SequenceCut,
    activations,
    named_sizes,
    stands_alone,
)


def context_cut(
    annotated: AnnotatedGraph,
    excluded: frozenset[fx.Node],
    outside: frozenset[fx.Node],
    rings: frozenset[fx.Node] = frozenset(),
) -> SequenceCut:
    """Return what the devices of context parallel stages compute a part of, without the ops that are `excluded`.

    Values read `outside` are joined; what `rings` read whole goes round in parts.
    """
    walk = _PartsWalk(annotated, excluded, outside, rings)
    for node in reversed(annotated.graph.graph.nodes):
        if node in walk.computed and not is_item(node):
            walk.visit(node)
    return SequenceCut(walk.ops, walk.joined, is_asked=True, rings=rings & walk.ops.keys())


class _PartsWalk:
    """Goes from the last op to the first: what readers take in parts is known when their operands are visited."""

    def __init__(
        self,
        annotated: AnnotatedGraph,
        excluded: frozenset[fx.Node],
        outside: frozenset[fx.Node],
        rings: frozenset[fx.Node],
    ) -> None:
        self.annotated, self.factors, self.joined, self.rings = annotated, annotated.factors, outside, rings
        self.activations = activations(annotated.graph, annotated.factors, annotated.flow)
        needed = (stage_nodes(annotated, layout).needed for layout in annotated.context_layouts)
        self.computed = frozenset(n for nodes in needed for n in nodes if self.factors.is_op(n)) - excluded
        self.ops: dict[fx.Node, Classes] = {}

    def visit(self, node: fx.Node) -> None:
        able = leading(self.factors.op(node), computable_on_part(node, self.annotated))
        readers = list(self._readers(node)) if able else []
        if node in self.activations:
            unwanted = able.difference(*(found for _, found in readers)) if self._grows(node) and readers else NOTHING
            self.ops[node] = able - unwanted
        elif readers and node not in self.joined:
            self.ops[node] = able.intersection(*(found for _, found in readers))

    def _readers(self, node: fx.Node) -> Iterator[tuple[fx.Node, Classes]]:
        """Yield the ops that read a value, or an item of it, with the classes in whose parts they read it."""
        for user in node.users:
            if user not in self.computed:
                continue
            if is_item(user):
                yield from self._readers(user)
            else:
                yield user, self._parts_read(user, node)

    def _parts_read(self, reader: fx.Node, node: fx.Node) -> Classes:
        """Return the classes in whose parts an op reads a value: its own, or that in whose parts the value travels."""
        op, cut = self.factors.op(reader), self.ops.get(reader, NOTHING)
        read = frozenset(c for c in cut if self._reads_part(reader, node, c))
        if not cut or reader not in self.rings:
            return read
        return read.union(c for i, c in op.travelling.items() if op.operands[i].node is node)

    def _reads_part(self, reader: fx.Node, node: fx.Node, factor: FactorClass) -> bool:
        return any(factor in o.classes for o in _read(self.factors.op(reader).cut_at(factor)) if o.node is node)

    def _grows(self, node: fx.Node) -> bool:
        """Tell whether a value is a linear function of one that is no larger, which is cheaper to put together."""
        source = linear_source(node, self.factors, self.annotated.flow)
        return source is not None and meta.numel(node) >= meta.numel(source)


def leading(op: OpFactors, able: Classes) -> Classes:
    """Return the class that comes first in the result, of several: queries are cut rather than keys of another text."""
    order = [c for dims in op.results for dim in dims for c in dim]
    found = sorted(able, key=lambda c: (order.index(c) if c in order else len(order), c.id))
    return frozenset(found[:1])


def _read(op: OpFactors) -> list[OperandFactors]:
    return [operand for i, operand in enumerate(op.operands) if i not in op.unread]


def computable_on_part(node: fx.Node, annotated: AnnotatedGraph) -> Classes:
    """Return the sequence classes of which the op can compute a part."""
    if stands_alone(node, annotated.factors):
        return NOTHING
    op = annotated.factors.op(node)
    return frozenset(c for c in annotated.sequence & op.classes if _runs_on_part(node, op, c))


def _runs_on_part(node: fx.Node, op: OpFactors, factor: FactorClass) -> bool:
    seen = op.cut_at(factor)
    if factor in seen.whole | seen.sharded | seen.averaged:
        return False
    tensors = [*op.results, *(operand.dims for operand in _read(op))]
    first = [next((dim for dim in dims if factor in dim), ()) for dims in tensors]
    once = all(dim.count(factor) <= 1 for dim in first)
    alone = op.traits.counter_at is None or all(len(dim) <= 1 for dim in first)  # it counts in a dim of its own
    named = named_sizes(node, seen)
    return once and alone and named is not None and all(_is_told(given, size, factor) for given, size in named)


def _is_told(given: object, size: SizeArg, factor: FactorClass) -> bool:
    """Tell whether a size that changes on a part, or is ambiguous beside an empty one, can be computed."""
    unknown = [c for c in size.classes if c.size is None and not c.is_batch and original(c) != factor]
    return not unknown or (factor not in size.classes and given != -1)


def check_shared(annotated: AnnotatedGraph, context: AxisDeduction) -> None:
    """Refuse to share a sequence where a product on activations would be computed whole on every device.

    Raises:
        PlanError: naming the op and the user's line.
    """
    parameters = reached_from(annotated.graph, [leaf.node for leaf in annotated.graph.leaves_of(LeafKind.PARAMETER)])
    for layout in annotated.context_layouts:
        needed = stage_nodes(annotated, layout).needed & parameters & context.decisions.keys()
        for node in filter(needed.__contains__, annotated.graph.graph.nodes):  # all ranks name the same op
            op = annotated.factors.op(node)
            if context.decisions[node].factor is None and op.classes & annotated.sequence and _is_product(op):
                raise PlanError(
                    f"devices {list(layout.devices)} cannot share the sequence (context {layout.context.ways}): "
                    f"{node.target} ('{node.name}', {meta.source_line(node)}) needs all of it, so that each device "
                    f"would compute the same; leave 'context' out for a tensor parallel stage, or use pipelines"
                )


def _is_product(op: OpFactors) -> bool:
    """Tell whether two operands have a class that no result has."""
    results = frozenset(c for dims in op.results for dim in dims for c in dim)
    classes = [operand.classes - results for operand in _read(op)]
    return any(a & b for i, a in enumerate(classes) for b in classes[:i])
