"""The op nodes of a graph as their rules see them: the first step of an analysis, node by node."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.factors.row_order import Routing, find_routing
from hetu_fx.deduction.rules.build import opaque
from hetu_fx.deduction.rules.call import Call, call_of
from hetu_fx.deduction.rules.forms import NO_TRAITS, Traits
from hetu_fx.deduction.rules.registry import rule_for
from hetu_fx.deduction.rules.rule import Factoring
from hetu_fx.errors import RuleError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph


class UnknownOpWarning(UserWarning):
    """An op has no rule (or one that does not fit): it runs on whole tensors, correct but slow."""


@dataclass(frozen=True, slots=True)
class FactoredOp:
    """An op node with its call and the factors of it."""

    call: Call
    factoring: Factoring
    known: bool
    traits: Traits


@dataclass(frozen=True, slots=True)
class FactoredOps:
    """The op nodes of a graph with the factors of each, and what routes rows among them."""

    steps: Mapping[fx.Node, FactoredOp]
    routing: Routing


def factor_ops(graph: Graph) -> FactoredOps:
    """Ask the rule of every op of a graph for its factors; see `analyse`."""
    told: set[str] = set()
    steps: dict[fx.Node, FactoredOp] = {}
    for node in graph.graph.nodes:
        if _is_tensor_op(node):
            steps[node] = _step(call_of(node), node, told)
    routing = find_routing(graph.graph, {node: (step.call, step.factoring) for node, step in steps.items()})
    for node, call in routing.calls.items():
        steps[node] = _step(call, node, told)
    return FactoredOps(steps, routing)


def _is_tensor_op(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    reads = any(meta.has_tensor(source) for source in node.all_input_nodes)
    return meta.has_tensor(node) or (reads and "sym_" not in str(node.target))


def _step(call: Call, node: fx.Node, told: set[str]) -> FactoredOp:
    rule = rule_for(node.target)
    problem = "has no rule"
    if rule is not None:
        try:
            return FactoredOp(call, rule.factor(call), True, rule.traits)
        except RuleError as error:
            problem = f"has a rule that does not fit: {error}"
    if call.op not in told:
        told.add(call.op)
        warnings.warn(
            f"op {call.op} {problem}; it runs on whole tensors, correct but slow ({call.where}); "
            "tell how its dims relate with hetu_fx.register_rule",
            UnknownOpWarning,
            stacklevel=4,
        )
    return FactoredOp(call, opaque(call), False, NO_TRAITS if rule is None else rule.traits)
