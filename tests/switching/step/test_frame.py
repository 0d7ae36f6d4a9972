"""Outputs other than the loss: where they lie after a step, and what a rank without rows gives of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.frame import ValueRoute, _with_summed_copies, value_routes
from hetu_fx.switching.step.rows import plan_rows
from tests.switching.in_threads import as_two_ranks, runtime_of
from tests.transforms.plans import deduced, program_of


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


PLAN = Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),), share=1)))


class Several(nn.Module):
    """Returns rows, a sum over rows, and what no row has to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"rows": y, "total": y.sum(0), "norm": self.layer.weight.sum().view(1)}


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(Several(), (torch.randn(4, 6),))


def routes(program: Program, owned: tuple[int, int, int], plan: Plan = PLAN) -> dict[str, ValueRoute]:
    rows = plan_rows(plan, owned, shared=False)
    symbol = program.graph.batch_symbol
    made = value_routes(deduced(program, plan, wants_values=True), rows, {symbol: owned[0]}, shared=False)
    return {route.name: route for route in made}


def test_rows_lie_by_the_pipelines_and_go_to_the_ranks_that_brought_them(program: Program) -> None:
    route = routes(program, (1, 3, 0))["rows"]
    assert route.shape == (4, 6)
    assert (route.source.top, route.rows_dim) == (Split(0, (3, 1)), 0)
    assert route.target == Annotation.on((0, 1, 2), Split(0, (1, 3, 0)))


def test_every_pipeline_has_a_summand_of_a_sum_over_rows(program: Program) -> None:
    route = routes(program, (1, 3, 0))["total"]
    assert (route.summed, route.source.top) == (True, Partial(2))
    assert route.target == Annotation.on((0, 1, 2), Duplicate(3))


def test_what_no_row_has_to_do_with_comes_from_a_pipeline_that_had_rows(program: Program) -> None:
    assert routes(program, (2, 2, 0))["norm"].source.ranks == (0, 1)
    late = Plan((Pipeline((Stage((0, 1)),), share=1), Pipeline((Stage((2,)),), share=9)))
    assert routes(program, (1, 0, 0), late)["norm"].source.ranks == (2,)


def test_micro_batches_are_joined_by_what_the_output_is(program: Program) -> None:
    made, pieces = routes(program, (1, 3, 0)), [torch.ones(2, 6), torch.ones(1, 6)]
    assert made["rows"].joined(pieces).shape == (3, 6)
    assert made["total"].joined([torch.ones(6), torch.ones(6)]).tolist() == [2] * 6
    assert made["norm"].joined([torch.tensor([5.0]), torch.tensor([5.0])]) == 5


def test_a_rank_without_rows_gives_no_rows_but_zeros_of_a_sum(program: Program) -> None:
    made, table, zero = routes(program, (1, 0, 0)), GroupTable.dry(2, 3), torch.zeros(())
    assert made["rows"].without_rows(zero, table).shape == (0, 6)
    assert made["total"].without_rows(zero, table).tolist() == [0] * 6


def test_the_gradients_of_copies_are_summands() -> None:
    assert _with_summed_copies(Annotation.on((0, 1), Duplicate(2))) == Annotation.on((0, 1), Partial(2))
    rows = Annotation.on((0, 1), Split(0, (3, 1)))
    assert _with_summed_copies(rows) == rows
