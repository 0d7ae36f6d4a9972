"""The HAP search as the table knows it, and problems of captured models, against sizes worked out by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.count.graph_problem import graph_problem_of
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.hap.adapter import translations
from hetu_fx.planner.search.hap.prices import round_shares
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.problem import Candidates, predict_by_costs
from hetu_fx.planner.searches import AUTO, HAP
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.tensor_program import TensorProgram
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from tests.model_zoo import SAMPLES, captured, example
from tests.oracles.hap_programs import layouts
from tests.planner.search.hap.graphs import Stack, run_of_plan
from tests.planner.search.hap.released import P100, V100, of_bandwidths
from tests.planner.search.hap.small import LINES, feed_forward
from tests.planner.search.nets import UNEQUAL, Convolutions, Perceptron, images, mean_square, problem
from tests.transforms.plans import program_of, same_in_group


def named(rows: int, width: int, inner: int, layers: int) -> TensorProgram:
    """Return feed-forward layers whose factors have one name throughout, and whose rows are known as such."""
    problem = feed_forward(rows, width, inner, layers)
    ops = []
    for op in problem.ops:
        layer = op.name.partition(".")[0]
        names = {"b": "rows", "k": "width", "o": f"inner{layer}"}
        if op.name.endswith("second"):
            names = {"b": "rows", "k": f"inner{layer}", "o": "width"}
        if op.name == "sum":
            names["o"] = "width"
        operands, results = (tuple(tuple(names[f] for f in dims) for dims in of) for of in (op.operands, op.results))
        ops.append(replace(op, operands=operands, results=results))
    tensors = (replace(t, row_dim=0 if t.kind != "parameter" and t.shape else None) for t in problem.tensors)
    return TensorProgram(tuple(tensors), tuple(ops), problem.outputs, problem.blocks)


@pytest.mark.parametrize(
    ("flops", "total", "shares"),
    [
        ((V100, V100, P100, P100), 128, (41, 41, 23, 23)),
        ((1, 1, 1), 4, (1, 1, 2)),
        ((1, 99), 1, (0, 1)),
    ],
)
def test_shares_are_rounded_as_in_the_released_code(
    flops: tuple[int, ...], total: int, shares: tuple[int, ...]
) -> None:
    assert round_shares([each / sum(flops) for each in flops], total) == shares


def test_a_program_that_cuts_rows_becomes_a_data_parallel_plan() -> None:
    problem, cluster = named(4096, 16, 32, 2), Cluster.on_paper([3e6, 1e6])
    result = search(problem, cluster, collectives=LINES)
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.plan.pipelines == (
        Pipeline((Stage((0,)),), share=3),
        Pipeline((Stage((1,)),), share=1),
    )
    assert translation.loss_seconds == pytest.approx(0, abs=1e-9)


def test_a_program_that_cuts_parameters_becomes_a_tensor_parallel_plan() -> None:
    problem, cluster = named(16, 64, 512, 2), Cluster.on_paper([3e5, 1e5])
    result = search(problem, cluster, collectives=LINES)
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.plan.pipelines == (Pipeline((Stage((0, 1), (3, 1)),)),)
    assert translation.plan.split == (("0.up", 0), ("1.up", 0))
    assert translation.seconds == pytest.approx(translation.result.seconds, rel=1e-3)  # of ratios near 3 : 1
    assert translation.loss_seconds >= 0


def test_what_no_plan_can_say_is_named_with_its_seconds() -> None:
    problem, cluster = named(512, 16, 512, 2), Cluster.on_paper([3e7, 1e7])
    large = {"0.up": 400.0, "0.down": 400.0, "1.up": 0.1, "1.down": 0.1}
    tensors = tuple(replace(t, element_bytes=large.get(t.name, 4.0)) for t in problem.tensors)
    problem = replace(problem, tensors=tensors)
    result = search(problem, cluster, collectives=LINES)
    rows = {step.form.cut == "rows" for step in result.program.steps if step.form.cut}
    assert rows == {True, False}
    translation = translations(problem, result, cluster, collectives=LINES)[0]
    assert translation.loss_seconds == pytest.approx(translation.seconds - result.seconds)
    assert translation.loss_seconds > 1e-3 * result.seconds
    assert f"loses {translation.loss_seconds:.4g} s" in translation.why


def without_program(found: Candidates) -> dict[Plan, float]:
    return {plan: seconds for plan, seconds in found.items() if not plan.has_program}


def nearest(found: Candidates) -> Plan:
    """Return the best plan that carries no program."""
    plain = without_program(found)
    return min(plain, key=lambda plan: plain[plan])


def test_a_net_that_is_cut_in_other_ways_than_groups_would_choose_is_faster_than_what_other_searches_find() -> None:
    asked = problem(UNEQUAL)
    found = HAP.find(asked)
    best = nearest(found)
    assert best.split
    assert found[best] < 0.95 * min(CONTIGUOUS.find(asked).values())
    assert min(without_program(AUTO.find(asked)).values()) == found[best]
    assert min(AUTO.find(asked).values()) == min(found.values())


def test_a_plan_is_priced_for_what_its_groups_split() -> None:
    asked = problem(UNEQUAL)
    best = nearest(HAP.find(asked))
    assert asked.captured is not None
    costs = asked.captured.costs_of(best.split)
    assert costs.whole.split_flops != asked.costs.whole.split_flops
    seconds = predict_by_costs(best, asked).seconds
    assert seconds == expect(best, costs, UNEQUAL).seconds
    assert seconds != expect(best, asked.costs, UNEQUAL).seconds


def test_what_a_plan_cannot_say_of_the_program_is_noted() -> None:
    best = nearest(HAP.find(problem(UNEQUAL)))
    assert best.predicted is not None
    assert "hap, by its own prices: tensor parallel loses" in best.predicted.why
    assert "which no plan can say" in best.predicted.why


def test_the_program_is_a_plan_too_and_the_best_by_its_own_prices() -> None:
    asked = problem(UNEQUAL)
    found = HAP.find(asked)
    (program,) = [plan for plan in found if plan.has_program]
    prediction = predict_by_costs(program, asked)
    assert prediction.seconds == found[program]
    assert dict(prediction.devices[0].seconds)["compute"] > 0
    assert asked.captured is not None
    own = {plan: run_of_plan(asked.captured.hap, plan, UNEQUAL).seconds for plan in found}
    assert min(own, key=lambda plan: own[plan]) == program
    (best,) = make_plans(asked, "hap")
    assert best.has_program == (found[program] < min(without_program(found).values()))


def test_a_program_is_not_priced_without_the_graph() -> None:
    asked = problem(UNEQUAL)
    (program,) = [plan for plan in HAP.find(asked) if plan.has_program]
    with pytest.raises(PlanError, match=r"a plan with a program is priced op by op.*\nhint: .*leave the program out"):
        predict_by_costs(program, replace(asked, captured=None))


def test_a_problem_without_a_graph_is_refused_with_the_way_out_and_auto_does_without() -> None:
    asked = replace(problem(UNEQUAL), captured=None)
    with pytest.raises(PlanError, match=r"cannot be used here: .*captured graph.*\nhint: .*search='hap'\).*'auto'"):
        make_plans(asked, "hap")
    assert make_plans(asked, "auto")


def test_without_groups_there_are_rows_only() -> None:
    found = HAP.find(problem(UNEQUAL, tensor_parallel=False))
    assert found
    assert all(len(stage.devices) == 1 for plan in found for *_, stage in plan.stages)


def test_where_no_program_fits_it_says_so_and_finds_nothing() -> None:
    told: list[str] = []
    small = Cluster.on_paper([2e11, 1e11], memory_bytes=1 << 20, intra=Link(1e10, 1e-6))
    assert HAP.find(replace(problem(small), tell=told.append)) == {}
    assert told[0].startswith("hap: ")
    with pytest.raises(PlanError, match="no plan fits the memory"):
        make_plans(problem(small), "hap")


def in_double(model: nn.Module) -> nn.Module:
    return model.double().train()


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], Any]] = {
    "convolutions": (Convolutions, {"x": images(6)["x"].double()}, mean_square),
    "perceptron": (Perceptron, {"x": torch.randn(6, 24, dtype=torch.float64)}, mean_square),
    "llama": (lambda: SAMPLES["llama"].model(num_hidden_layers=1), example("llama"), None),
}
LIMITS = {"llama": 1e-6}  # its norms round to float32, and programs take means of parts there


@pytest.mark.parametrize("name", NETS)
def test_groups_that_it_finds_run_like_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    make, batch, loss_fn = NETS[name]
    torch.manual_seed(0)
    found = found_for(make, batch, loss_fn)
    groups = [plan for plan in found if len(plan.pipelines) == 1]
    assert any(len(stage.devices) > 1 for plan in groups for *_, stage in plan.stages)
    model = in_double(make())
    program = program_of(model, batch, loss_fn)
    for plan in groups:
        same_in_group(program, model, plan, batch, limit=LIMITS.get(name, 1e-10))


def found_for(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], loss_fn: Any) -> set[Plan]:
    program = CapturedProgram.of(Programs(in_double(make()), loss_fn), batch)
    costs = program.costs(memory=False)
    base = problem(UNEQUAL)
    asked = replace(base, profile=replace(base.profile, costs=costs), captured=program.at(costs))
    return set(HAP.find(asked))


FAST_AND_SLOW = Cluster.on_paper([2e12, 1e12], intra=Link(1e10, 1e-6))


@functools.cache
def stack(layers: int = 3) -> Graph:
    return capture(Stack(layers), {"x": torch.randn(8, 16, 64)}, loss_fn=lambda out, **batch: out)


def test_tensors_have_the_factors_of_the_models_dims() -> None:
    problem = graph_problem_of(Analyse()(stack())).program
    weight = problem.by_name["layers.0.qkv.weight"]
    assert (weight.shape, weight.origin, weight.kind) == ((3, 4, 16, 64), (0, 0, 0, 1), "parameter")
    [x] = [tensor for tensor in problem.tensors if tensor.kind == "input"]
    assert (x.shape, x.row_dim, x.bytes, x.has_gradient) == ((8, 16, 64), 0, 4 * 8 * 16 * 64, False)


def test_views_are_no_ops_and_products_count_their_flops() -> None:
    problem = graph_problem_of(Analyse()(stack())).program
    names = " ".join(op.name for op in problem.ops)
    assert "transpose" not in names
    assert "view" not in names
    [product] = [op for op in problem.ops if "layers.0.up.weight" in op.reads]
    flops = 2 * 8 * 16 * 64 * 256
    assert product.flops == flops
    assert problem.all_flops(product) == 3 * flops
    first = next(op for op in problem.ops if "layers.0.qkv.weight" in op.reads)
    assert problem.all_flops(first) == 2 * first.flops  # the batch has no gradient


def test_a_larger_batch_scales_rows_and_work() -> None:
    one, two = (graph_problem_of(Analyse()(stack()), rows=rows).program for rows in (8, 16))
    assert [op.flops * 2 for op in one.ops[:5]] == [op.flops for op in two.ops[:5]]
    assert {t.shape[t.row_dim] for t in two.tensors if t.row_dim is not None} == {16}


def test_equal_layers_are_searched_once() -> None:
    problem = graph_problem_of(Analyse()(stack(6))).program
    assert len(problem.blocks) == 6
    once, all_of_them = (search(one, FAST_AND_SLOW) for one in (problem, replace(problem, blocks=())))
    assert once.seconds == pytest.approx(all_of_them.seconds, rel=1e-9)
    assert [step.op.name for step in once.program.steps] == [op.name for op in problem.ops]


def test_heads_and_feed_forward_are_cut_for_few_rows_and_rows_where_there_are_many() -> None:
    equally_fast = of_bandwidths(1e8, 1e8, 1e8, 1e8)
    held = []
    for rows in (2, 4096):
        result = search(
            graph_problem_of(Analyse()(stack()), rows=rows).program,
            Cluster.on_paper([2e9, 1e9]),
            collectives=equally_fast,
        )
        held.append([str(layouts(result)[f"layers.1.{name}.weight"]) for name in ("qkv", "up")])
    assert held == [["split 1", "split 0"], ["copy", "copy"]]  # by heads: the second factor of the fused dim


def test_parts_of_the_model_may_have_ratios_of_their_own() -> None:
    problem = graph_problem_of(Analyse()(stack()), segment_per_part=True).program
    assert {op.segment for op in problem.ops} == {1, 2}
    apart, together = (search(one, FAST_AND_SLOW).seconds for one in (problem, problem.in_one_segment()))
    assert apart <= together * (1 + 1e-6)


def test_the_plan_of_a_captured_model_names_parameters_of_the_model() -> None:
    problem = graph_problem_of(Analyse()(stack())).program
    result = search(problem, FAST_AND_SLOW)
    translation = translations(problem, result, FAST_AND_SLOW)[0]
    parameters = {tensor.name for tensor in problem.tensors if tensor.kind == "parameter"}
    assert {name for name, _ in translation.plan.split} <= parameters
    translation.plan.check(num_blocks=3, world_size=2)
    assert translation.loss_seconds >= -1e-9


def test_a_graph_without_parameters_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

    graph = capture(Nothing(), {"x": torch.randn(4, 4)}, loss_fn=lambda out, **batch: out)
    with pytest.raises(PlanError, match="no value of the graph depends on a parameter"):
        graph_problem_of(Analyse()(graph))


@pytest.mark.parametrize("name", ["bert", "conv", "gpt2", "vit"])
def test_models_of_the_zoo_have_programs_no_slower_than_their_plans(name: str) -> None:
    problem = graph_problem_of(Analyse()(captured(name)[1])).program
    result = search(problem, FAST_AND_SLOW)
    assert translations(problem, result, FAST_AND_SLOW)[0].loss_seconds >= -1e-6 * result.seconds
