"""What a job is made ready with: plans that are made while it runs compute in the dtypes that it was given."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster import measure
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner import captured_program
from hetu_fx.planner.captured_program import PlannedModule
from hetu_fx.planner.count import count
from hetu_fx.planner.values.options import ANY, Choice
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.prepare import _planner_like, _warn_of_layout
from hetu_fx.program.tracer import Tracer


class Small(nn.Module):
    """A model that takes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.pow(2).mean()


def test_a_small_model_is_captured_measured_and_planned_for_once_and_says_where_seconds_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: Counter[str] = Counter()

    def counting(place: Any, name: str) -> None:
        plain = getattr(place, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            done[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(place, name, counted)

    for place, name in (
        (Tracer, "trace"),
        (measure, "matmul_flops_per_second"),
        (measure, "measure_cluster"),
        (captured_program, "make_plan"),
        (count, "_counted"),
        (count, "program_memory"),
    ):
        counting(place, name)
    model: Any = hetu_fx.auto_parallelize(Small(), {"x": torch.randn(4, 4)}, check=False)
    once = "trace", "matmul_flops_per_second", "measure_cluster", "make_plan", "_counted"
    assert done == dict.fromkeys(once, 1)
    model(torch.randn(4, 4)).backward()
    assert done["trace"] == 1
    phases = "meet the other ranks, capture, count costs, measure, plan, place parameters, try the plan".split(", ")
    assert [name for name in model.hetu.stats["prepared"] if name != "import"] == phases
    assert all(f"{phase} " in model.hetu.explain().splitlines()[-1] for phase in phases)


LOW = Plan((Pipeline((Stage((0,), dtype="bfloat16"), Stage((1,)))),))


class Planned:
    """Gives back how it was asked to plan."""

    def plan(self, cluster: Cluster, name: str, choice: Choice = ANY) -> Choice:
        return choice


@pytest.mark.parametrize(("plans", "choice"), [((Plan.single(), LOW), Choice.of(allow="bfloat16")), ((), ANY)])
def test_later_plans_may_compute_in_the_dtypes_of_those_given(plans: tuple[Plan, ...], choice: Choice) -> None:
    planner = _planner_like(plans, cast(Any, Planned()))
    assert planner(Cluster.on_paper([1e9, 1e9]), "later") == choice


def test_a_channels_last_model_is_told_where_its_layout_stays() -> None:
    plain, last = (nn.Conv2d(4, 4, 3).to(memory_format=form) for form in (torch.contiguous_format, torch.channels_last))
    for model, ranks, told in ((last, 2, 1), (last, 1, 0), (plain, 2, 0), (nn.Conv2d(1, 4, 1), 2, 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _warn_of_layout(model, cast(Any, SimpleNamespace(rank=0, size=ranks)))
        assert len(seen) == told
        assert all("hint: pass inputs in channels_last too" in str(warning.message) for warning in seen)


def test_a_module_that_runs_as_it_is_is_planned_for_as_ever() -> None:
    planned = PlannedModule(cast(ProgramCosts, None))
    assert _planner_like((LOW,), planned) == planned.plan
