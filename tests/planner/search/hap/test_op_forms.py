"""Forms of ops, against the strategies by which deduction says that the same ops run."""

from __future__ import annotations

import pytest
from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, flat
from hetu_fx.planner.count.graph_problem import GraphProblem, factor_name, graph_problem_of
from hetu_fx.planner.search.hap.op_forms import SynthesisRules, op_forms
from hetu_fx.planner.search.hap.tensor_states import COPY, PARTIAL, SHARED, Layout, split
from hetu_fx.program.program import make_program
from hetu_fx.transforms.layouts.axis import ProgramStrategies
from hetu_fx.transforms.layouts.program_choices import OpCut
from hetu_fx.transforms.layouts.sequence_parallel import UNCUT
from hetu_fx.transforms.layouts.states import WHOLE, AxisState, OpStrategy, SplitOn, Summed
from hetu_fx.transforms.layouts.strategies import gives_summands
from tests.model_zoo import captured
from tests.planner.search.hap.graphs import convolutions, perceptron, stack

SUMS = SynthesisRules(sufficient_factors=False)


def layout(node: fx.Node, state: AxisState, problem: GraphProblem, *, summed: bool = False) -> Layout:
    match state:
        case SplitOn(factor):
            return split(flat(problem.sources[node][1]).index(factor))
        case Summed():
            return PARTIAL
        case _:
            return SHARED if summed and problem.program.by_name[problem.sources[node][0]].has_gradient else COPY


def reads(node: fx.Node, strategy: OpStrategy, problem: GraphProblem) -> list[Layout]:
    flow = problem.analysed.flow
    return [
        layout(need.node, need.state, problem, summed=gives_summands(node, strategy, need, flow))
        for need in strategy.needs
    ]


def zoo(name: str) -> GraphProblem:
    return graph_problem_of(make_program(captured(name)[1], frozenset()).analysed)


PROBLEMS = {"perceptron": perceptron, "convolutions": convolutions, "stack": stack} | {
    name: lambda name=name: zoo(name) for name in ("bert", "gpt2", "llama")
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_op_that_is_cut_reads_and_makes_what_deduction_says(name: str) -> None:
    problem = PROBLEMS[name]()
    analysed, compared = problem.analysed, 0
    classes = {factor_name(c): c for c in analysed.factors.classes}
    for node, op in zip(problem.nodes, problem.program.ops, strict=True):
        states = {operand.node: WHOLE for operand in analysed.factors.op(node).operands}
        for form in op_forms(op, problem.program, SUMS, 2):
            if form.cut is not None:
                choices = {node: OpCut(classes[form.cut])}
                rules = analysed.factors, analysed.flow, frozenset[FactorClass](), UNCUT, True
                (own,) = ProgramStrategies(*rules, choices=choices).of(node, states)
                told = zip(form.reads, reads(node, own, problem), strict=True)
                assert all(have is None or have == said for have, said in told), (node, form, own)
                is_looked_across = classes[form.cut] in analysed.factors.op(node).sharded  # HAP takes it for a sum
                if node in problem.sources and not is_looked_across:
                    assert form.makes == (layout(node, own.result, problem),), (node, form, own)
                compared += 1
    assert compared >= len(problem.nodes)
