from dataclasses import replace

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.step.execution import check_takes_any_row


def test_a_plan_whose_pipelines_take_some_sequences_only_is_not_run() -> None:
    plan = Plan.data_parallel([0, 1])
    check_takes_any_row(plan)
    limited = replace(plan, pipelines=(plan.pipelines[0], replace(plan.pipelines[1], max_length=512)))
    with pytest.raises(PlanError, match=r"\{1: 512\} by index, but rows are handed out by shares"):
        check_takes_any_row(limited)
