"""Programs of stages, said of programs that were found: each op's own, and no more of them than differ."""

from __future__ import annotations

from fnmatch import fnmatchcase as fnmatch

import pytest
import torch

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.count.graph_problem import GraphProblem, factor_name
from hetu_fx.planner.search.hap.adapter import hap_stage, is_expressible
from hetu_fx.planner.search.hap.op_forms import SynthesisRules
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.search.hap.tensor_states import PARTIAL
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.stage import Stage
from hetu_fx.transforms.layouts.program_choices import op_names
from tests.planner.search.hap.graphs import TWO_TO_ONE, convolutions, graph_problem, perceptron, stack
from tests.planner.search.nets import mean_square


def said(problem: GraphProblem, cluster: Cluster = TWO_TO_ONE, **rules: bool) -> tuple[Stage, HapResult]:
    found = search(is_expressible(problem), cluster, rules=SynthesisRules(**rules))  # type: ignore[arg-type]
    return hap_stage(problem, found), found


def named(region: OpRegion, problem: GraphProblem) -> set[str]:
    """Return the factors that a region names, whether an op has them or not."""
    told, factors = region.leaf_dim, problem.analysed.factors
    if told is None:
        return {factor_name(c) for c in factors.classes if c.is_batch} if region.is_cut else set()
    dims = [factors.dims(leaf.node)[told.dim] for leaf in factors.leaves if fnmatch(leaf.name, told.leaf)]
    return {factor_name(c) for dim in dims for i, c in enumerate(dim) if told.factor in (None, i)}


@pytest.mark.parametrize("make", [perceptron, convolutions, stack])
@pytest.mark.parametrize("speed", [1e9, 1e10, 1e12])
def test_the_first_region_that_matches_an_op_says_what_its_step_does(make: object, speed: float) -> None:
    problem: GraphProblem = make()  # type: ignore[operator]
    stage, found = said(problem, Cluster.on_paper([2 * speed, speed], intra=Link(1e10, 1e-6)))
    names = op_names(problem.analysed.graph)
    for node, step in zip(problem.nodes, found.program.steps, strict=True):
        region = next(region for region in stage.program if fnmatch(names[node], region.ops))
        if step.form.cut is None:
            assert region.split == ("summands" if PARTIAL in step.form.reads else "whole")
            continue
        own = {factor_name(c) for c in problem.analysed.factors.op(node).classes}
        assert named(region, problem) & own == {step.form.cut}
        assert region.factors == bool(step.form.gathered)


def test_ops_of_blocks_that_do_the_same_are_one_region() -> None:
    stage, found = said(stack())
    patterns = [region.ops for region in stage.program]
    assert len(patterns) < len(found.program.steps) / 2
    assert not any(".1." in pattern for pattern in patterns)
    up = next(region for region in stage.program if fnmatch("layers.1.up:linear", region.ops))
    assert up.ops == "layers.*.up:linear"


def test_ratios_are_small_whole_numbers_that_lose_next_to_nothing() -> None:
    stage, found = said(perceptron())
    assert stage.ratios == (2, 1)
    shares = tuple(ratio / sum(stage.ratios) for ratio in stage.ratios)
    assert found.program.seconds(found.speeds, (shares,)) == pytest.approx(found.seconds, rel=2e-3)


def test_factors_are_said_where_they_are_sent_and_only_there() -> None:
    slow = Cluster.on_paper([2e10, 1e10], intra=Link(1e8, 1e-6))
    sent, summed = (said(perceptron(), slow, sufficient_factors=allowed)[0] for allowed in (True, False))
    assert not any(region.factors for region in summed.program)
    assert isinstance(sent.program, tuple)


def test_nothing_is_cut_on_what_no_parameter_and_no_input_has() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight)[:, :, None] * torch.arange(64.0, device=x.device)

    problem = graph_problem(Outer, {"x": torch.randn(3, 4)}, mean_square)
    last = next(op for op in is_expressible(problem).ops if len(op.results[0]) == 3)
    assert len(last.whole & set(last.results[0])) == 1
