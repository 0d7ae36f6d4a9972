"""Choose which factor classes a tensor-parallel group splits.

The choice is made once per graph, from the rules alone: a class is worth splitting when splitting it spreads many
FLOPs for few communicated elements. On a transformer this yields key-value heads, the feed-forward width and the
vocabulary, which is Megatron's choice; on other models whatever the same ratio says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.reshard_cost import product_flops

# A class whose FLOPs per communicated element are below this share of what most FLOPs have is left whole: splitting
# the hidden width, say, spreads every projection but communicates every activation.
_WORTH = 0.2

# Elements that a sharded form communicates for each row of a sharded factor: its normalizer and what it picks.
_PER_ROW = 3


@dataclass
class _Tally:
    flops: float = 0.0
    communicated: float = 0.0

    @property
    def score(self) -> float:
        return self.flops / max(self.communicated, 1.0)


def tensor_classes(
    graph: Graph, factors: FactorMap, flow: Flow, wanted: Sequence[FactorClass] = ()
) -> frozenset[FactorClass]:
    """Return the classes to split over a tensor-parallel group; never two that one op could split.

    `wanted` are split whatever they cost, the first of two rivals.
    """
    tallies = _tally(graph, factors, flow)
    eligible = [c for c in tallies if is_eligible(c, factors)]
    rivals = _rivals(graph, factors)
    ranked = sorted((c for c in eligible if tallies[c].flops > 0), key=lambda c: (-tallies[c].score, c.id))
    chosen: list[FactorClass] = []
    for candidate in (*wanted, *ranked):
        if rivals[candidate].isdisjoint(chosen):
            chosen.append(candidate)
    least = _WORTH * _typical([tallies[c] for c in chosen])
    worth = [c for c in chosen if c in wanted or tallies[c].score >= least]
    tables = [c for c in _vocabularies(graph, factors) if c in eligible and rivals[c].isdisjoint(worth)]
    return frozenset((*worth, *tables))


def _typical(tallies: list[_Tally]) -> float:
    """Return the median score by FLOPs: half of all FLOPs are in classes that have at least this score."""
    half, passed = sum(tally.flops for tally in tallies) / 2, 0.0
    for tally in sorted(tallies, key=lambda t: -t.score):
        passed += tally.flops
        if passed >= half:
            return tally.score
    return 0.0


def _vocabularies(graph: Graph, factors: FactorMap) -> list[FactorClass]:
    """Return the classes of tables that are looked up for every row of the batch and larger than what is read of them.

    A look-up has no FLOPs to spread, but its table is stored, has a gradient and is updated.
    """
    found: set[FactorClass] = set()
    for node in graph.graph.nodes:
        looked_up = factors.op(node).sharded & factors.op(node).reduced if factors.is_op(node) else frozenset()
        for factor in looked_up:
            tables = [leaf.node for leaf, _ in factors.leaf_dims(factor) if leaf.node in node.all_input_nodes]
            if factors.row_dim(node) is not None and any(meta.numel(t) >= meta.numel(node) for t in tables):
                found.add(factor)
    return sorted(found, key=lambda c: c.id)


def is_eligible(factor: FactorClass, factors: FactorMap) -> bool:
    """Tell whether a class can be split over a tensor-parallel group, and parameters have it."""
    known = factor.size is not None and factor.size > 1 and not factor.is_batch
    return known and factors.splittable(factor) and bool(factors.occurrences(factor))


def _tally(graph: Graph, factors: FactorMap, flow: Flow) -> Mapping[FactorClass, _Tally]:
    tallies: dict[FactorClass, _Tally] = defaultdict(_Tally)
    counted_backward: set[tuple[FactorClass, fx.Node]] = set()
    for node in graph.graph.nodes:
        if factors.is_op(node) and flow.is_mixed(node):
            _tally_op(node, factors, flow, tallies, counted_backward)
    return tallies


def _tally_op(
    node: fx.Node,
    factors: FactorMap,
    flow: Flow,
    tallies: dict[FactorClass, _Tally],
    counted_backward: set[tuple[FactorClass, fx.Node]],
) -> None:
    op = factors.op(node)
    flops = product_flops(node, op) if meta.is_tensor(node) else 0.0
    for factor in op.classes:
        tally = tallies[factor]
        if factor in op.whole:
            having = [o.node for o in op.operands if factor in o.classes]
            tally.communicated += sum(map(meta.numel, having))
            continue
        tally.flops += flops
        if factor in op.sharded and factor.size:
            split = [o.node for o in op.operands if factor in o.classes and flow.is_mixed(o.node)]
            tally.communicated += sum(_PER_ROW * meta.numel(value) / factor.size for value in split)
        if factor in op.reduced and meta.is_tensor(node):
            tally.communicated += meta.numel(node)
        for operand in op.operands:
            lacks = factor not in operand.classes
            edge = (factor, operand.node)
            if lacks and flow.is_mixed(operand.node) and edge not in counted_backward:
                counted_backward.add(edge)
                tally.communicated += meta.numel(operand.node)


def _rivals(graph: Graph, factors: FactorMap) -> Mapping[FactorClass, set[FactorClass]]:
    """Return for each class those that stand in one op with it, where either could be split but not both."""
    rivals: dict[FactorClass, set[FactorClass]] = defaultdict(set)
    for node in graph.graph.nodes:
        if not factors.is_op(node):
            continue
        present = factors.op(node).classes - factors.op(node).whole
        for factor in present:
            rivals[factor] |= present - {factor}
    return rivals
