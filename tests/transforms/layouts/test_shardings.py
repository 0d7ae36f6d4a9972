"""Where parameters lie follows from the annotated graph alone, as the deduction of all its ops finds it."""

from __future__ import annotations

import pytest

from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.shardings import StageShardings
from tests.model_zoo import example, llama
from tests.transforms.plans import deduced, pipeline, program_of, zoo_program

PLANS = {
    "replicas": Plan.data_parallel(3),
    "a group with ratios": Plan.tensor_parallel((0, 1), (2, 1)),
    "a group of more devices than heads": Plan.tensor_parallel(6),
    "stages of groups": Plan((pipeline((0, 1), (2,), micro_batches=2), pipeline((3,), (4, 5)))),
    "a shared sequence": Plan.context_parallel(2),
    "a grid": Plan((Pipeline((Stage((0, 1, 2, 3), context=2),)),)),
    "chunks": Plan((pipeline((0,), (1,), micro_batches=2),), schedule="interleaved"),
    "a program": Plan((Pipeline((Stage((0, 1), program=(OpRegion("*", "rows"),)),)),)),
}


@pytest.mark.parametrize("name", PLANS)
def test_parameters_lie_where_the_deduced_states_say(name: str) -> None:
    plan = PLANS[name]
    has_chunks = plan.chunks > 1
    program = program_of(llama(num_hidden_layers=4), example("llama")) if has_chunks else zoo_program("llama")
    found = StageShardings(Annotate(plan, wants_values=False)(program.analysed)).parameters_read()
    whole = deduced(program, plan)
    assert found
    assert found == {
        leaf.name: whole.across(leaf.node, whole.holders(leaf), "duplicate") for leaf in whole.parameters()
    }
