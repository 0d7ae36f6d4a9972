"""Gradients of a step: handed on as they arrive, and nothing of the step outlives it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.check.verdict import judge
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.runtime import Runtime
from tests.switching.in_threads import as_two_ranks, runtime_of


def parallel(table: GroupTable) -> tuple[Runtime, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4),)
    return runtime_of(table, model, batch, lambda output, input: output.pow(2).mean()), batch


def loss_of(runtime: Runtime, batch: tuple[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = runtime.run(batch, {}).loss
    return loss


def leaf_of(loss: torch.Tensor) -> torch.Tensor:
    """Find a compute parameter behind a loss."""
    queue = [loss.grad_fn]
    while queue:
        node = queue.pop(0)
        variable = getattr(node, "variable", None)
        if variable is not None and type(variable) is torch.Tensor:
            return variable
        inner = [piece.grad_fn for piece in node.step.pieces] if hasattr(node, "step") else []
        queue += [following for following in (*inner, *(f for f, _ in node.next_functions)) if following is not None]
    raise AssertionError("no leaf")


def plain_of(model: nn.Module) -> nn.Linear:
    """Make a plain module of the same values."""
    plain = nn.Linear(4, 3)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return plain


@as_two_ranks
def test_leaves_of_a_step_that_is_over_are_those_of_the_next(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    loss = loss_of(runtime, batch)
    leaf = leaf_of(loss)
    loss.backward()
    again = loss_of(runtime, batch)
    assert leaf_of(again) is leaf
    assert leaf.grad is None


@as_two_ranks
def test_steps_at_once_have_leaves_of_their_own(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    model = runtime.model
    loss_of(runtime, batch).backward()
    model.zero_grad()
    losses = [loss_of(runtime, batch) for _ in range(2)]
    assert leaf_of(losses[0]) is not leaf_of(losses[1])
    (losses[0] + 3 * losses[1]).backward()
    plain = plain_of(model)
    (4 * plain(*batch).pow(2).mean()).backward()
    assert torch.allclose(model.weight.grad.full_tensor(), plain.weight.grad)


@as_two_ranks
def test_a_step_that_may_be_repeated_keeps_its_leaves(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    model = runtime.model
    loss = loss_of(runtime, batch)
    loss.backward(retain_graph=True)
    other = loss_of(runtime, batch)
    assert leaf_of(other) is not leaf_of(loss)
    loss.backward()
    plain = plain_of(model)
    (2 * plain(*batch).pow(2).mean()).backward()
    assert torch.allclose(model.weight.grad.full_tensor(), plain.weight.grad)


@as_two_ranks
def test_other_parameters_of_before_and_frozen_ones_have_leaves_of_their_own(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    model = runtime.model
    loss = loss_of(runtime, batch)
    leaf = leaf_of(loss)
    loss.backward()
    model.weight.data = torch.ones(3, 4)
    loss = loss_of(runtime, batch)
    assert leaf_of(loss) is not leaf
    loss.backward()
    model.bias.requires_grad_(False)
    model.zero_grad()
    loss_of(runtime, batch).backward()
    assert model.bias.grad is None
    assert model.weight.grad is not None


@as_two_ranks
def test_leaves_go_with_the_copies_of_the_parameters_that_they_share_their_memory_with(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    loss = loss_of(runtime, batch)
    leaf = weakref.ref(leaf_of(loss))
    loss.backward()
    del loss
    assert leaf() is not None
    runtime.variants[runtime.current].compute.drop_copies()
    assert leaf() is None


@as_two_ranks
def test_parameters_of_a_step_go_without_a_backward_too(table: GroupTable) -> None:
    runtime, batch = parallel(table)
    loss = loss_of(runtime, batch)
    leaf = weakref.ref(leaf_of(loss))
    del loss
    assert leaf() is None


def test_a_rank_alone_computes_in_micro_batches_with_what_a_script_puts_in_data() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    plan = hetu_fx.Plan((hetu_fx.Pipeline((hetu_fx.Stage((0,)),), micro_batches=2),))
    model = hetu_fx.auto_parallelize(model, (x,), plan=plan, loss_fn=lambda output, input: output.pow(2).mean())
    for value in (None, torch.ones(3, 4), torch.full((3, 4), 2.0)):
        for one in (model, plain):
            one.zero_grad()
            if value is not None:
                one.weight.data = value.clone()
        model(x).loss.backward()
        plain(x).pow(2).mean().backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)


class Signs(nn.Module):
    """A weight whose only gradient comes from its signs: zeros that autograd keeps no memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.rand(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight.sign()) * self.scale).pow(2).mean()


@pytest.mark.parametrize("plan", [Plan.single(), Plan.data_parallel((0, 1), (3, 1)), Plan.tensor_parallel((0, 1))])
def test_gradients_that_are_zeros_without_memory_are_those_of_one_device(plan: Plan) -> None:
    torch.manual_seed(0)
    model, batch = Signs(), {"x": torch.randn(8, 4, dtype=torch.float64)}
    how, batches = Lockstep(), [batch, batch]
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
