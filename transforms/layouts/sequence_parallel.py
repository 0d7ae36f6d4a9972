"""Sequence and context parallelism: what the devices of a stage compute a part of a sequence of.

A tensor-parallel group cannot split one of the model's own classes between the projections of a transformer's block
(norms, residuals, dropout): every device would do the same. Each does a part of the sequence instead (Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models, section 4.2.2): the sum after a projection comes out
in parts, and the next projection gathers them. In the backward each of the two does what the other does in the
forward; the gradients of what all parts read, a norm's weight, are summands.

The devices of a context parallel stage share the sequence throughout, attention included. Every op on activations runs
on its device's part of the tokens. An op in which the sequence plays two parts is cut in the first (see
`hetu_fx.deduction.factors.dual_roles`): attention computes the part's queries against all keys and values, which are
gathered once per layer (Dubey et al., The Llama 3 Herd of Models, section 3.3.2); in the backward their gradients are
reduced and scattered. Or they stay in parts that go round (see `hetu_fx.transforms.layouts.deduce`). The devices hold
all parameters, and each has a summand of their gradients.

Nothing here knows what a sequence or attention is. It is the classes that products with parameters carry along: those
of the result that the parameter lacks, but for the rows of the batch. Their lengths may be symbolic, and parts of them
empty. What is read whole by all its readers is put together where it is smallest, and what depends on inputs alone
(positions, masks, labels) is computed for a part where that is all that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from hetu_fx.annotations.states import proportional_sizes
from hetu_fx.deduction.factors.dual_roles import original
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, SizeArg, flat
from hetu_fx.deduction.rules.call import call_argument
from hetu_fx.graph import meta
from hetu_fx.graph.edit import descendants
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, stage_nodes
from hetu_fx.transforms.layouts.flow import Flow, is_item, linear_source

Classes = frozenset[FactorClass]
Runs = Callable[[fx.Node, OpFactors, FactorClass], bool]
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
    return (op.made - op.whole).difference(*contracted) if contracted else NOTHING


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
        exchanged: ops that run on a part of another class instead, for which their operands are cut anew.
    """

    ops: Mapping[fx.Node, Classes] = field(default_factory=dict)
    joined: frozenset[fx.Node] = frozenset()
    is_asked: bool = False
    rings: frozenset[fx.Node] = frozenset()
    exchanged: Mapping[fx.Node, FactorClass] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Classes:
        """Return the classes that an op may run on a part of."""
        return self.ops.get(node, NOTHING)


UNCUT = SequenceCut()


def sequence_cut(annotated: AnnotatedGraph, excluded: frozenset[fx.Node], outside: frozenset[fx.Node]) -> SequenceCut:
    """Return what may be cut under a plan, without the ops that are `excluded`; values read `outside` are joined."""
    if not annotated.plan.sequence_parallel:
        return UNCUT
    able = activations(annotated.graph, annotated.factors, annotated.flow) - excluded
    return SequenceCut({node: _cuttable(node, annotated, _runs_on_rows) for node in able}, outside)


def activations(graph: Graph, factors: FactorMap, flow: Flow) -> frozenset[fx.Node]:
    """Return the ops that batch and parameters both reach, the latter by tensors; masks have but sizes of them."""

    def tensors(node: fx.Node) -> list[fx.Node]:
        return [operand.node for operand in factors.op(node).operands] if factors.is_op(node) else []

    parameters = [leaf.node for leaf in graph.leaves_of(LeafKind.PARAMETER)]
    reached = descendants(graph, parameters, tensors)
    return frozenset(node for node in reached if node.op == "call_function" and flow.through_inputs(node))


def _cuttable(node: fx.Node, annotated: AnnotatedGraph, runs: Runs) -> Classes:
    """Return the sequence classes of which an op can compute a part: those in parts of which it `runs`."""
    if _stands_alone(node, annotated.factors):
        return NOTHING
    op = annotated.factors.op(node)
    return frozenset(c for c in annotated.sequence & op.classes if runs(node, op, c))


def _runs_on_rows(node: fx.Node, op: OpFactors, factor: FactorClass) -> bool:
    """Tell whether an op runs on a part of a class that some operand has, and that is a dim of its own everywhere."""
    read = [operand.dims for operand in op.read]
    dims = [dim for dims in (*op.results, *read) for dim in dims if factor in dim]
    given = any(factor in dim for dims in read for dim in dims)
    alone = given and factor not in op.whole | op.sharded | op.averaged and all(dim == (factor,) for dim in dims)
    return alone and _are_told(node, op, lambda value, size: _is_told_of_rows(value, size, factor))


def _stands_alone(node: fx.Node, factors: FactorMap) -> bool:
    """Tell whether an op must run as it is: it draws, counts rows, or has them in an order of their own."""
    op = factors.op(node)
    return op.random or bool(op.counted) or not factors.shard_ordered.isdisjoint((node, *node.all_input_nodes))


def _are_told(node: fx.Node, op: OpFactors, is_told: Callable[[object, SizeArg], bool]) -> bool:
    """Tell whether each size that a call names `is_told` for a part, and no class leaves one of them unexplained."""
    named = [call_argument(node, size.path) for size in op.size_args]
    explained = {*(o.node for o in op.operands), *(given for given in named if isinstance(given, fx.Node))}
    return explained.issuperset(node.all_input_nodes) and all(map(is_told, named, op.size_args))


def _is_told_of_rows(given: object, size: SizeArg, factor: FactorClass) -> bool:
    """Tell whether a size is the sequence's own, or has nothing to do with it; -1 is ambiguous beside an empty part."""
    if size.classes == (factor,):
        return True
    return factor not in size.classes and (given != -1 or all(c.size is not None for c in size.classes))


def context_cut(
    annotated: AnnotatedGraph,
    excluded: frozenset[fx.Node],
    outside: frozenset[fx.Node],
    rings: frozenset[fx.Node] = frozenset(),
    exchanged: Mapping[fx.Node, FactorClass] | None = None,
) -> SequenceCut:
    """Return what the devices of context parallel stages compute a part of, without the ops that are `excluded`.

    Values read `outside` are joined; what `rings` read whole goes round in parts, and `exchanged` ops run on parts of
    another class.
    """
    walk = _PartsWalk(annotated, excluded, outside, rings, exchanged or {})
    for node in reversed(annotated.graph.graph.nodes):
        if node in walk.computed and not is_item(node):
            walk.visit(node)
    return SequenceCut(walk.ops, walk.joined, is_asked=True, rings=rings & walk.ops.keys(), exchanged=exchanged or {})


class _PartsWalk:
    """Goes from the last op to the first: what readers take in parts is known when their operands are visited."""

    def __init__(
        self,
        annotated: AnnotatedGraph,
        excluded: frozenset[fx.Node],
        outside: frozenset[fx.Node],
        rings: frozenset[fx.Node],
        exchanged: Mapping[fx.Node, FactorClass],
    ) -> None:
        self.exchanged = exchanged
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
        if reader in self.exchanged:
            return cut if any(self.exchanged[reader] in o.classes for o in op.read if o.node is node) else NOTHING
        read = frozenset(c for c in cut if self._reads_part(reader, node, c))
        if not cut or reader not in self.rings:
            return read
        return read.union(c for i, c in op.travelling.items() if op.operands[i].node is node)

    def _reads_part(self, reader: fx.Node, node: fx.Node, factor: FactorClass) -> bool:
        return any(factor in o.classes for o in self.factors.op(reader).with_cut(factor).read if o.node is node)

    def _grows(self, node: fx.Node) -> bool:
        """Tell whether a value is a linear function of one that is no larger, which is cheaper to put together."""
        source = linear_source(node, self.factors, self.annotated.flow)
        return source is not None and meta.numel(node) >= meta.numel(source)


def leading(op: OpFactors, able: Classes) -> Classes:
    """Return the class that comes first in the result, of several: queries are cut rather than keys of another text."""
    order = [c for dims in op.results for c in flat(dims)]
    found = sorted(able, key=lambda c: (order.index(c) if c in order else len(order), c.id))
    return frozenset(found[:1])


def computable_on_part(node: fx.Node, annotated: AnnotatedGraph) -> Classes:
    """Return the sequence classes of which the op can compute a part."""
    return _cuttable(node, annotated, _runs_on_part)


def _runs_on_part(node: fx.Node, op: OpFactors, factor: FactorClass) -> bool:
    seen = op.with_cut(factor)
    if factor in seen.whole | seen.sharded | seen.averaged:
        return False
    tensors = [*op.results, *(operand.dims for operand in op.read)]
    first = [next((dim for dim in dims if factor in dim), ()) for dims in tensors]
    once = all(dim.count(factor) <= 1 for dim in first)
    alone = op.traits.counter_at is None or all(len(dim) <= 1 for dim in first)  # it counts in a dim of its own
    return once and alone and _are_told(node, seen, lambda value, size: _is_told(value, size, factor))


def _is_told(given: object, size: SizeArg, factor: FactorClass) -> bool:
    """Tell whether a size that changes on a part, or is ambiguous beside an empty one, can be computed."""
    unknown = [c for c in size.classes if c.size is None and not c.is_batch and original(c) != factor]
    return not unknown or (factor not in size.classes and given != -1)


def is_product(op: OpFactors) -> bool:
    """Tell whether two operands have a class that no result has."""
    classes = [operand.classes - op.made for operand in op.read]
    return any(a & b for i, a in enumerate(classes) for b in classes[:i])
