"""Products whose weights' gradients wait: which do, and that nothing but the time changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from hetu_fx.graph import meta
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.lowering.later_products import LATER_PRODUCTS, LaterProducts, later_product
from hetu_fx.transforms.lowering.product_calls import product_call, product_operands
from hetu_fx.transforms.lowering.weights_later import WeightsLater, without_waiting
from hetu_fx.transforms.specialize.device_graph import SlotKind
from tests.transforms.cases import Case
from tests.transforms.plans import device_graph, program_of

LINEAR = "aten.linear.default"
Run = Callable[[Tensor, Tensor, Tensor, LaterProducts | None], Tensor]


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = (2, 5, 4), (4, 4), (4,)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, weight, bias


def once(x: Tensor, weight: Tensor, bias: Tensor, later: LaterProducts | None) -> Tensor:
    return later_product(later, LINEAR, x, weight, bias).sin().sum()


def twice(x: Tensor, weight: Tensor, bias: Tensor, later: LaterProducts | None) -> Tensor:
    return later_product(later, LINEAR, later_product(later, LINEAR, x, weight, bias).tanh(), weight, None).sum()


def cast(x: Tensor, weight: Tensor, bias: Tensor, later: LaterProducts | None) -> Tensor:
    narrow = weight.to(torch.float32)
    return later_product(later, LINEAR, x.to(torch.float32), narrow, None).double().sin().sum() + bias.sum()


def recomputed(x: Tensor, weight: Tensor, bias: Tensor, later: LaterProducts | None) -> Tensor:
    made: Tensor = checkpoint(twice, x, weight, bias, later, use_reentrant=False, preserve_rng_state=False)
    return made


@pytest.mark.parametrize("run", [once, twice, cast, recomputed])
def test_gradients_are_those_of_autograd(run: Run) -> None:
    found = leaves()
    later = LaterProducts()
    run(*found, later).backward()
    later.make()
    expected = leaves()
    run(*expected, None).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", LATER_PRODUCTS)
def test_gradients_of_later_micro_batches_are_added_to_what_is_there(name: str) -> None:
    def run(x: Tensor, weight: Tensor, bias: Tensor, later: LaterProducts | None) -> Tensor:
        return later_product(later, name, x[0], weight, None).sin().sum()

    x, weight, bias = leaves()
    for _ in range(3):
        later = LaterProducts()
        run(x, weight, bias, later).backward()
        later.make()
    expected = leaves()
    run(*expected, None).backward()
    assert expected[1].grad is not None
    torch.testing.assert_close(weight.grad, 3 * expected[1].grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("run", [once, twice, recomputed])
def test_weights_wait_until_they_are_asked_for(run: Run) -> None:
    x, weight, bias = leaves()
    later, seen = LaterProducts(), list[Tensor]()
    weight.register_post_accumulate_grad_hook(seen.append)
    run(x, weight, bias, later).backward()
    assert x.grad is not None
    assert (weight.grad, seen) == (None, [])
    later.make()
    assert seen == [weight]  # once, however many products read it


def test_a_product_of_what_wants_no_gradient_does_not_wait() -> None:
    x, weight, bias = leaves()
    once(x.detach(), weight, bias, LaterProducts()).backward()
    assert weight.grad is not None


def test_weights_that_are_not_trained_get_no_gradient() -> None:
    x, weight, bias = leaves()
    later = LaterProducts()
    once(x, weight.requires_grad_(False), bias, later).backward()
    later.make()
    assert weight.grad is None
    assert bias.grad is not None


@pytest.mark.parametrize("plan", [Plan.single(), Plan.tensor_parallel((0, 1), (2, 1))], ids=["one", "tensor"])
def test_all_products_with_parameters_wait_under_zero_bubble_and_none_otherwise(llama: Case, plan: Plan) -> None:
    device = device_graph(llama.program, plan, 0)
    before = [node for node in device.graph.nodes if str(node.target) in LATER_PRODUCTS]
    assert WeightsLater("1f1b")(device) is device
    made = WeightsLater("zero-bubble")(device)
    made.graph.lint()
    assert [node for node in made.graph.nodes if node.target is later_product] == before
    assert [slot.kind for slot in made.slots].count(SlotKind.LATER) == 1
    assert len(before) == 7 * 2 + 1  # four of attention and three of the feed-forward in each block, and the head


def test_a_graph_without_waiting_is_the_one_that_it_was(llama: Case) -> None:
    before = device_graph(llama.program, Plan.single(), 0)
    assert without_waiting(before) is before
    slots, text = before.slots, str(before.graph)
    waiting = WeightsLater("zero-bubble")(before)
    changed = str(waiting.graph)
    found = without_waiting(waiting)
    assert (found.slots, str(found.graph)) == (slots, text)
    assert str(waiting.graph) == changed != text


@pytest.mark.parametrize("name", LATER_PRODUCTS)
def test_a_product_that_waited_takes_what_it_took(name: str) -> None:
    graph = fx.Graph()
    x, weight, bias, like = (graph.placeholder(name) for name in ("x", "weight", "bias", "like"))
    meta.set_value(like, torch.empty(3))
    meta.keep_num_dims(like, bias)
    some = [None] if LATER_PRODUCTS[name].bias is None else [bias] if name == "aten.addmm.default" else [bias, None]
    for one in some:
        op, given = product_call(name, x, weight, one)
        assert product_operands(graph.call_function(op, given)) == (x, weight, one)


class Doubled(nn.Module):
    """A product with what is made of a parameter, and with none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x), 2 * self.layer.weight)


def test_a_product_with_what_is_made_of_a_parameter_does_not_wait() -> None:
    device = device_graph(program_of(Doubled(), (torch.ones(3, 4),)), Plan.single(), 0, wants_values=True)
    made = WeightsLater("zero-bubble")(device)
    left = [str(node.target) for node in made.graph.nodes if str(node.target) in LATER_PRODUCTS]
    assert left == [LINEAR]
    assert [node.target for node in made.graph.nodes].count(later_product) == 1
