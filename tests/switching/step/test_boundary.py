"""The user's graph of autograd ends at a step: what scripts ask of it there is what a module gives on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.runtime import Runtime
from tests.switching.in_threads import as_two_ranks, runtime_of


class Scored(nn.Module):
    """Returns logits, of which the loss is made outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.last(self.first(x).tanh())
        return logits


def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain, x = Scored().double(), torch.randn(5, 4, dtype=torch.float64)
    parallel = hetu_fx.auto_parallelize(copy.deepcopy(plain), (x,), plan=hetu_fx.Plan.single(0))
    return plain, parallel, x


def test_gradients_of_parameters_and_inputs_come_by_autograd_grad() -> None:
    found = []
    for model in pair()[:2]:
        x = pair()[2].requires_grad_()
        found.append(torch.autograd.grad(model(x).pow(2).sum(), [*model.parameters(), x]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_backward_may_be_repeated_where_the_graph_is_kept() -> None:
    plain, parallel, x = pair()
    for model in (plain, parallel):
        loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    torch.testing.assert_close(parallel.first.weight.grad, plain.first.weight.grad)


def replicated(table: GroupTable) -> tuple[Runtime, Tensor]:
    torch.manual_seed(0)
    model, x = Scored().double(), torch.randn(5, 4, dtype=torch.float64)
    return runtime_of(table, model, (x,)), x


@as_two_ranks
def test_a_second_backward_without_the_graph_is_refused(table: GroupTable) -> None:
    runtime, x = replicated(table)
    loss = runtime.run((x,), {}).sum()
    loss.backward()
    with pytest.raises(StateError, match="a second time"):
        loss.backward()


@as_two_ranks
def test_second_derivatives_are_refused(table: GroupTable) -> None:
    runtime, x = replicated(table)
    with pytest.raises(StateError, match="second derivative"):
        torch.autograd.grad(runtime.run((x,), {}).sum(), list(runtime.homes.values()), create_graph=True)


def test_a_rank_alone_has_second_derivatives() -> None:
    found = []
    for model in pair()[:2]:
        x = pair()[2].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_hooks_of_parameters_see_each_gradient_once() -> None:
    plain, parallel, x = pair()
    seen: dict[int, list[float]] = {0: [], 1: []}
    for i, model in enumerate((plain, parallel)):
        model.last.weight.register_hook(lambda gradient, i=i: seen[i].append(float(gradient.norm())))
        for _ in range(2):
            model(x).pow(2).sum().backward()
    assert len(seen[1]) == 2
    assert seen[1] == pytest.approx(seen[0])


def test_gradients_of_parameters_that_were_computed_go_on_to_those_that_they_are_computed_from() -> None:
    plain, parallel, x = pair()
    for model in (plain, parallel):
        halves = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        made: Tensor = torch.func.functional_call(model, halves, (x,))
        made.pow(2).sum().backward()
    for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
