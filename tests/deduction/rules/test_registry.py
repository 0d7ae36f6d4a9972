"""Rules are looked up by op; users add their own; what has no rule is whole and told once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hetu_fx.deduction.factors.analyse import UnknownOpWarning, analyse
from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.registry import find_rule, register_rule, unregister_rule
from hetu_fx.deduction.rules.rule import Factoring
from hetu_fx.errors import RuleError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph

NAME = "hetu_rule_tests.scaled.default"


@torch.library.custom_op("hetu_rule_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@scaled.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Twice(nn.Module):
    """Calls the op twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(scaled(x, self.scale), self.scale)


@pytest.fixture
def graph() -> Graph:
    return capture(Twice(), {"x": torch.randn(5, 4)}, training=False)


@pytest.fixture
def _own_rules() -> Iterator[None]:
    yield
    unregister_rule(NAME)


def op_of(graph: Graph, factors: FactorMap) -> OpFactors:
    return next(factors.op(node) for node in graph.graph.nodes if str(node.target) == NAME)


def test_an_op_without_a_rule_is_whole_and_told_once_with_its_line(graph: Graph) -> None:
    with pytest.warns(
        UnknownOpWarning, match=r"hetu_rule_tests.scaled.default has no rule.*test_registry.py:\d+"
    ) as told:
        factors = analyse(graph)
    op = op_of(graph, factors)
    assert len(told) == 1
    assert not op.known
    assert op.whole == {cls for operand in op.operands for dim in operand.dims for cls in dim} | {
        cls for dim in op.results[0] for cls in dim
    }


@pytest.mark.usefixtures("_own_rules")
def test_a_registered_line_makes_the_op_known(graph: Graph) -> None:
    register_rule(torch.ops.hetu_rule_tests.scaled.default, "... k, k -> ... k", linear="each")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownOpWarning)
        factors = analyse(graph)
    op = op_of(graph, factors)
    assert op.known
    assert (op.whole, op.reduced) == (frozenset(), frozenset())
    assert factors.occurrences(op.results[0][1][0]) == (("scale", 0),)


@pytest.mark.usefixtures("_own_rules")
def test_a_registered_function_is_asked_for_each_call(graph: Graph) -> None:
    def whole_columns(call: Call) -> Factoring:
        rows, columns = ("a",), ("b",)
        return Factoring(((rows, columns), (columns,)), ((rows, columns),), whole=frozenset(columns))

    register_rule(NAME, whole_columns)
    op = op_of(graph, analyse(graph))
    assert op.whole == set(op.operands[1].dims[0])


@pytest.mark.usefixtures("_own_rules")
def test_a_rule_that_does_not_fit_is_told_and_the_op_stays_whole(graph: Graph) -> None:
    register_rule(NAME, "a b c, c -> a b c")
    with pytest.warns(UnknownOpWarning, match="has a rule that does not fit"):
        factors = analyse(graph)
    assert not op_of(graph, factors).known


def test_malformed_names_and_lines_are_refused() -> None:
    with pytest.raises(RuleError, match=r"'namespace.name.overload'"):
        register_rule("scaled", "... -> ...")
    with pytest.raises(RuleError, match="one '->'"):
        register_rule(NAME, "... k, k")


def test_patterns_and_pointwise_tags_find_a_rule() -> None:
    assert find_rule(torch.ops.aten.special_bessel_j0.default) is not None
    assert find_rule("mylib.my_grouped_mm_fallback.default") is not None
    assert find_rule(torch.ops.aten.nonzero.default) is None
    assert find_rule(torch.ops.aten.rrelu.default) is None  # point by point, but at random
