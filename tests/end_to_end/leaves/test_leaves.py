"""A model around a part of which no graph can be made trains as on one device, under every plan."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch

import hetu_fx
from hetu_fx.errors import PlanError
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.graph_execution import GraphExecution
from tests.end_to_end.leaves.kinds import KINDS, LAYERS, Model, batch_of, made

PLANS = {
    "rows 3:1": Plan.data_parallel((0, 1), (3, 1)),
    "tensor parallel": Plan.tensor_parallel((0, 1)),
    "mixed": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),)))),
    "stages": Plan((Pipeline((Stage((0,)), Stage((1,)))),)),
}


def trains_as_alone(model: Model, plan: Plan, captured: GraphExecution | None = None) -> None:
    """Check two steps, of which the second has fewer rows."""
    batches = [batch_of(8), batch_of(6)]
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, plan, captured)
    for step, own in zip(found.steps, alone.steps, strict=True):
        assert step.loss == pytest.approx(own.loss, rel=1e-10)
        for name, gradient in own.gradients.items():
            torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    for name, value in alone.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-10, atol=1e-12)


@cache
def with_a_named_part(kind: str) -> tuple[Model, GraphExecution]:
    """Return a model of which the user has named the part, and its capture, which is the same for all plans."""
    model, part = made(kind)
    hetu_fx.leaf(part)
    return model, Lockstep().capture(model, batch_of(8))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_the_user_names_is_called_as_it_is_on_all_rows(kind: str, plan: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeafWarning)
        model, captured = with_a_named_part(kind)
        trains_as_alone(model, PLANS[plan], captured)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_found_by_itself_with_a_warning_that_names_it(kind: str) -> None:
    model, part = made(kind)
    where = f"{'middle' if kind in LAYERS else 'loss'} \\({type(part).__name__}\\) is a leaf.*kinds\\.py:"
    with pytest.warns(LeafWarning, match=where):
        trains_as_alone(model, PLANS["rows 3:1"])


@pytest.mark.parametrize("kind", ["dice", "numpy"])
def test_micro_batches_are_refused_by_its_name(kind: str) -> None:
    model, part = made(kind)
    hetu_fx.leaf(part)
    plan = Plan((Pipeline((Stage((0,)),), share=3, micro_batches=2), Pipeline((Stage((1,)),))))
    with pytest.raises(PlanError, match=type(part).__name__):
        Lockstep().train(model, [batch_of(8)], plan)
