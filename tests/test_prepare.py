"""What a job is made ready with: plans that are made while it runs compute in the dtypes that it was given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.module_program import PlannedModule
from hetu_fx.planner.values.options import ANY, Choice
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.prepare import _planner_like

LOW = Plan((Pipeline((Stage((0,), dtype="bfloat16"), Stage((1,)))),))


class Planned:
    """Gives back how it was asked to plan."""

    def plan(self, cluster: Cluster, name: str, choice: Choice = ANY) -> Choice:
        return choice


@pytest.mark.parametrize(("plans", "choice"), [((Plan.single(), LOW), Choice.of(allow="bfloat16")), ((), ANY)])
def test_later_plans_may_compute_in_the_dtypes_of_those_given(plans: tuple[Plan, ...], choice: Choice) -> None:
    planner = _planner_like(plans, cast(Any, Planned()))
    assert planner(Cluster.on_paper([1e9, 1e9]), "later") == choice


def test_a_module_that_runs_as_it_is_is_planned_for_as_ever() -> None:
    planned = PlannedModule(cast(ProgramCosts, None))
    assert _planner_like((LOW,), planned) == planned.plan
