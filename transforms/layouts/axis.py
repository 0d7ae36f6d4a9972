"""Deduce how every value lies on one axis, forward and cotangent, from the split factor classes alone.

The forward walk decides for every op which split factor it computes a part of, from the op's rule and the states of
its operands. The backward walk then says on which edges an op hands back only a summand of the cotangent: an operand
that lacks the factor its op is split on gets the sum over all parts. A cotangent is linear, so such summands may
flow further back; they are added up once for all consumers of a value. Where operands disagree, or there are several
places for a sum, prices decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.graph.graph import Graph, OutputKind
from hetu_fx.transforms.layouts.cotangents import CotangentWalk
from hetu_fx.transforms.layouts.flow import Flow, is_item
from hetu_fx.transforms.layouts.forward_search import ForwardWalk, Walk
from hetu_fx.transforms.layouts.output_states import OutputStates
from hetu_fx.transforms.layouts.reshard_cost import Prices
from hetu_fx.transforms.layouts.sequence_parallel import UNCUT, SequenceCut
from hetu_fx.transforms.layouts.states import AxisState, Need, OpStrategy, Whole
from hetu_fx.transforms.layouts.strategies import Strategies, gives_summands, passes_on

Splits = frozenset[FactorClass]

_DIGITS = 12  # of seconds: less is rounding


@dataclass(frozen=True)
class AxisDeduction:
    """States of all values on one axis.

    Attributes:
        splits: the factor classes that the axis splits.
        decisions: how each op runs.
        made: how each value comes out of its op.
        states: how it lies once its consumers read it (sums already made where `keep_sums` was not asked).
        summed_cotangents: values whose consumers all give back summands, which nothing sums within the graph.
    """

    splits: Splits
    decisions: Mapping[fx.Node, OpStrategy]
    made: Mapping[fx.Node, AxisState]
    states: Mapping[fx.Node, AxisState]
    summed_cotangents: frozenset[fx.Node]

    def needs(self, node: fx.Node) -> tuple[Need, ...]:
        """Return what `node` needs of its tensor operands; nothing for leaves and items of a tuple."""
        decision = self.decisions.get(node)
        return decision.needs if decision else ()

    @property
    def talks(self) -> bool:
        """Tell whether some op needs a value, or gives back a cotangent, in another state than it is in."""
        return next(self.talking(), None) is not None

    def talking(self) -> Iterator[fx.Node]:
        """Yield the ops for which communication along the axis is needed."""
        return (node for node, decision in self.decisions.items() if any(map(self._differs, decision.needs)))

    @property
    def exchanged(self) -> tuple[fx.Node, ...]:
        """Return the values that are exchanged along the axis, then those whose cotangents are."""
        needs = [need for decision in self.decisions.values() for need in decision.needs]
        values = dict.fromkeys(need.node for need in needs if self.states[need.node] != need.state)
        return (*values, *dict.fromkeys(need.node for need in needs if self._sums_cotangent(need)))

    def _differs(self, need: Need) -> bool:
        return self._sums_cotangent(need) or self.states[need.node] != need.state

    def _sums_cotangent(self, need: Need) -> bool:
        return need.summed_cotangent and need.node not in self.summed_cotangents


def deduce_batch_axis(graph: Graph, factors: FactorMap, flow: Flow, rows: Splits) -> AxisDeduction:
    """Deduce the axis on which the rows of the batch are spread over pipelines and micro-batches.

    Sums stay unsummed as long as the ops are linear in them: a loss is summed over replicas and micro-batches at the
    very end. An op that needs a split factor whole is an error: the rows of other pipelines and micro-batches cannot
    be brought in. So nothing is left to choose.

    Raises:
        DeductionError: naming the op, the user's line and the way out.
    """
    strategies = Strategies(factors, flow, rows, UNCUT, may_gather=False)
    walk = ForwardWalk(graph, strategies, OutputStates(factors, rows, UNCUT)).walk()
    marks = _CotangentMarks(flow, walk, lambda node: True)
    if rows:
        marks.start(node for _, node in graph.outputs_of(OutputKind.VALUE))
    return marks.deduction(graph, rows)


def deduce_tensor_axis(
    graph: Graph,
    factors: FactorMap,
    flow: Flow,
    splits: Splits,
    prices: Prices,
    *,
    cut: SequenceCut = UNCUT,
    outside: frozenset[fx.Node] = frozenset(),
) -> AxisDeduction:
    """Deduce the axis of a tensor-parallel group, on which `splits` are split, at the least price found.

    What splits none of `splits` runs on a part of a sequence where `cut` allows it. `outside` are values that others
    than the stage's ops read.
    """
    strategies = Strategies(factors, flow, splits, cut, may_gather=True)
    output_states = OutputStates(factors, splits, cut, outside)
    walks = [ForwardWalk(graph, strategies, output_states, prices, hopeful=hopeful).walk() for hopeful in (False, True)]
    found = [(walk, CotangentWalk(graph, flow, walk, prices, outside).sums()) for walk in walks]
    walk, sums = min(found, key=lambda pair: round(pair[0].seconds + pair[1].seconds, _DIGITS))
    marks = _CotangentMarks(flow, walk, lambda node: node in sums.unsummed or not flow.through_inputs(node))
    return marks.deduction(graph, splits)


class _CotangentMarks:
    """The backward walk: marks the edges that give back summands, from the last op to the first.

    `may_stay` tells of which values the cotangent may stay unsummed, if all consumers give back summands.
    """

    def __init__(self, flow: Flow, walk: Walk, may_stay: Callable[[fx.Node], bool]) -> None:
        self.flow, self.walk, self.may_stay = flow, walk, may_stay
        self.marked: dict[fx.Node, OpStrategy] = {}
        self.flags: dict[fx.Node, list[bool]] = defaultdict(list)
        self.summed: set[fx.Node] = set()

    def deduction(self, graph: Graph, splits: Splits) -> AxisDeduction:
        """Return the walk with all edges marked."""
        for node in reversed(graph.graph.nodes):
            self.visit(node)
        return AxisDeduction(splits, self.marked, self.walk.made, self.walk.states, frozenset(self.summed))

    def start(self, outputs: Iterable[fx.Node]) -> None:
        """Take note of outputs: the gradient of one that is whole in all replicas comes to one of them only."""
        for node in outputs:
            if isinstance(self.walk.states.get(node), Whole):
                self.flags[node].append(True)

    def visit(self, node: fx.Node) -> None:
        if is_item(node):
            return  # decided with its op, for all results alike
        results = [node, *(user for user in node.users if is_item(user))]
        flags = [flag for result in results for flag in self.flags[result]]
        decision = self.walk.decisions.get(node)
        if flags and all(flags) and self.may_stay(node) and passes_on(node, decision, self.flow):
            self.summed.update(results)
        if decision is not None:
            self.marked[node] = self._marked(node, decision)
            for need in self.marked[node].needs if node in self.flow.differentiable else ():
                self.flags[need.node].append(need.summed_cotangent)

    def _marked(self, node: fx.Node, decision: OpStrategy) -> OpStrategy:
        def mark(need: Need) -> Need:
            summed = gives_summands(node, decision, need, self.flow, of_summands=node in self.summed)
            return replace(need, summed_cotangent=summed)

        return replace(decision, needs=tuple(map(mark, decision.needs)))
