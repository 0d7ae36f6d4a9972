from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.search.contiguous import CONTIGUOUS
from hetu_fx.planner.search.hap.adapter import HAP
from hetu_fx.planner.searches import AUTO
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from tests.model_zoo import SAMPLES, example
from tests.planner.search.nets import UNEQUAL, Convolutions, Perceptron, images, mean_square, problem
from tests.transforms.plans import program_of, same_in_group


def test_a_net_that_is_cut_in_other_ways_than_groups_would_choose_is_faster_than_what_other_searches_find() -> None:
    asked = problem(UNEQUAL)
    found = HAP.find(asked)
    best = min(found, key=lambda plan: found[plan])
    assert best.split
    assert found[best] < 0.95 * min(CONTIGUOUS.find(asked).values())
    assert min(AUTO.find(asked).values()) == found[best]


def test_a_plan_is_priced_for_what_its_groups_split() -> None:
    asked = problem(UNEQUAL)
    (best,) = make_plans(asked, "hap")
    assert best.predicted is not None
    assert asked.captured is not None
    costs = asked.captured.costs_of(best.split)
    assert costs.whole.split_flops != asked.costs.whole.split_flops
    assert best.predicted.seconds == predict(best, costs, UNEQUAL).seconds
    assert best.predicted.seconds != predict(best, asked.costs, UNEQUAL).seconds


def test_what_a_plan_cannot_say_of_the_program_is_noted() -> None:
    (best,) = make_plans(problem(UNEQUAL), "hap")
    assert best.predicted is not None
    assert "hap, by its own prices: tensor parallel loses" in best.predicted.why
    assert "which no plan can say" in best.predicted.why


def test_a_problem_without_a_graph_is_refused_with_the_way_out_and_auto_does_without() -> None:
    asked = replace(problem(UNEQUAL), captured=None)
    with pytest.raises(PlanError, match=r"cannot be used here: .*captured graph.*search='hap'\), or 'auto'"):
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
LIMITS = {"llama": 1e-7}  # its norms round to float32


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
