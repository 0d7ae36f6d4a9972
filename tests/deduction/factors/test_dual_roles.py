"""Ops in which a class plays several parts, seen as ops that cut it where it comes first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.dual_roles import elsewhere
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind


class Attention(nn.Module):
    """Self-attention written out, causal in the two ways that do not follow from the shapes, and in one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        weights = (scores + scores.transpose(1, 2)).softmax(-1)
        y = nn.functional.scaled_dot_product_attention(x, x, weights @ x, is_causal=True)
        return y.cumsum(1).sum()


def analysed() -> tuple[Graph, FactorMap, FactorClass]:
    graph = capture(Attention(), (torch.randn(3, 7, 6),))
    factors = analyse(graph)
    (x,) = graph.leaves_of(LeafKind.INPUT)
    ((sequence,),) = factors.dims(x.node)[1:2]
    return graph, factors, sequence


def op_of(graph: Graph, factors: FactorMap, name: str, number: int = 0) -> OpFactors:
    nodes = [node for node in graph.graph.nodes if str(node.target) == f"aten.{name}"]
    return factors.op(nodes[number])


def test_scores_are_cut_by_queries_with_all_keys_in_reach() -> None:
    graph, factors, sequence = analysed()
    op = op_of(graph, factors, "matmul.default")
    other = elsewhere(sequence)
    assert sequence in op.whole
    seen = op.with_cut(sequence)
    assert [[sequence in o.classes, other in o.classes] for o in seen.operands] == [[True, False], [False, True]]
    assert seen.results[0][1:] == ((sequence,), (other,))
    assert sequence not in seen.whole
    assert other in seen.whole


def test_what_is_normalized_over_keys_and_what_mixes_values_is_cut_by_queries() -> None:
    graph, factors, sequence = analysed()
    softmax = op_of(graph, factors, "softmax.int").with_cut(sequence)
    assert softmax.operands[0].dims == softmax.results[0]
    mixed = op_of(graph, factors, "matmul.default", 1).with_cut(sequence)
    assert [sequence in o.classes for o in mixed.operands] == [True, False]
    assert mixed.results[0][1] == (sequence,)


def test_what_comes_second_in_an_operand_and_first_in_the_result_stays_whole() -> None:
    graph, factors, sequence = analysed()
    turned = next(
        factors.op(node)
        for node in graph.graph.nodes
        if str(node.target) == "aten.transpose.int" and factors.dims(node)[1:] == ((sequence,), (sequence,))
    )
    assert sequence not in turned.apart
    assert turned.with_cut(sequence) is turned


def test_causal_attention_can_be_cut_by_queries_if_it_is_told_where_they_are() -> None:
    graph, factors, sequence = analysed()
    op = op_of(graph, factors, "scaled_dot_product_attention.default")
    assert sequence in op.whole
    assert op.placed == frozenset()
    assert op.with_cut(sequence).placed == {sequence}


def test_causal_attention_over_a_sequence_of_pairs_stays_whole() -> None:
    """Pairs have two positions each, so that a part of them is no range of as many positions."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(x.unflatten(1, (-1, 2)).transpose(-1, -2).contiguous())
            turned = torch.view_as_real(z * torch.polar(torch.ones_like(self.angles), self.angles)[:, None])
            y = turned.transpose(-1, -2).flatten(1, 2)
            return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).sum()

    graph = capture(Pairs(), (torch.randn(3, 8, 6),))
    factors = analyse(graph)
    op = op_of(graph, factors, "scaled_dot_product_attention.default")
    (outer, _inner) = op.results[0][1]
    assert outer in op.whole
    assert outer not in op.apart


def test_what_accumulates_along_the_sequence_stays_whole() -> None:
    graph, factors, sequence = analysed()
    op = op_of(graph, factors, "cumsum.default")
    assert (sequence in op.whole, op.apart) == (True, {})
