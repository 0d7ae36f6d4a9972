"""How much compiled graphs keep for backward: as much as torch is told, and nothing is sent or drawn twice for that."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hetu_fx.transforms.lowering.lower import lower
from tests.transforms.lowering.recorder import Recorder
from tests.transforms.lowering.test_block_modules import WIDTH, Cut, Tower
from tests.transforms.lowering.test_lower import module_of

aten, hetu = torch.ops.aten, torch.ops.hetu
budget = torch._functorch.config.patch
BUDGETS = (1.0, 0.5, 0.0)


class Kept:
    """Tells how many bytes of which storages are saved for backward."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._see, lambda saved: saved):
            yield

    def _see(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()  # of what is held until the graph is freed, so that no place comes twice
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return saved


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["plain", "dropout"])
@pytest.mark.parametrize("recompute", [0, 1])
def test_the_less_may_be_kept_the_less_is_and_gradients_stay(p: float, recompute: int) -> None:
    torch.manual_seed(0)
    made, x = Cut(Tower(8, 8, 8, p=p).double(), recompute), torch.randn(64, WIDTH).double()
    expected, function, sizes = made.gradients(made.whole.forward, x), lower(made.cut, "aot_eager"), []
    for most in BUDGETS:
        kept = Kept()
        with budget(activation_memory_budget=most):
            made.gradients(function, x)  # compiles
            with kept.watching():
                found = made.gradients(function, x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        sizes.append(kept.bytes)
    assert sizes[0] > sizes[1] >= sizes[2], sizes


def test_half_is_between_all_and_nothing() -> None:
    def layers(graph: fx.Graph, x: fx.Node, *weights: fx.Node) -> Sequence[Any]:
        for weight in weights:
            x = graph.call_function(aten.tanh.default, (graph.call_function(aten.linear.default, (x, weight)),))
        return [x]

    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((64, 8), *[(8, 8)] * 6)]
    function, sizes, gradients = lower(module_of(len(given), layers), "aot_eager"), [], []
    for most in BUDGETS:
        kept = Kept()
        with budget(activation_memory_budget=most):
            function(*given)  # compiles
            with kept.watching():
                (made,) = function(*given)
            gradients.append(torch.autograd.grad(made.sum(), given))
        sizes.append(kept.bytes)
    assert sizes[0] > sizes[1] > sizes[2], sizes
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-12, atol=1e-12)


def ops_of(made: fx.GraphModule) -> Counter[Any]:
    return Counter(node.target for node in made.graph.nodes)


def halves(make: Callable[..., Sequence[Any]], *given: Tensor) -> tuple[Counter[Any], Counter[Any]]:
    """Run a module forward and backward with nothing kept that need not be; give the ops of both halves."""
    compiler = Recorder()
    with budget(activation_memory_budget=0.0):
        result, *_ = lower(module_of(len(given), make), compiler)(*given)
        result.sum().backward()
    forward, backward = map(ops_of, compiler.graphs)
    return forward, backward


def test_what_is_sent_is_not_sent_again() -> None:
    def summed(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> Sequence[Any]:
        made = graph.call_function(aten.linear.default, (graph.call_function(aten.exp.default, (x,)), weight))
        total = graph.call_function(hetu.all_reduce.default, (made, [0], "duplicate"))
        return [graph.call_function(aten.exp.default, (graph.call_function(aten.sin.default, (total,)),))]

    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (5, 6)))
    forward, backward = halves(summed, x, weight)
    assert forward[hetu.all_reduce.default] == 1
    assert backward[hetu.all_reduce.default] == 0
    assert backward[aten.sin.default] == backward[aten.exp.default] == 1, "the last; what was sent is kept"
    expected = [t.detach().requires_grad_() for t in (x, weight)]
    torch.nn.functional.linear(expected[0].exp(), expected[1]).sin().exp().sum().backward()
    torch.testing.assert_close([x.grad, weight.grad], [t.grad for t in expected])


def test_products_of_rows_that_all_have_are_made_again() -> None:
    def products(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> Sequence[Any]:
        given = x, [weight], [], "aten.linear.default", [0], 0, [], "", ""
        made = graph.call_function(operator.getitem, (graph.call_function(hetu.gathered_products.default, given), 0))
        return [graph.call_function(aten.exp.default, (graph.call_function(aten.sin.default, (made,)),))]

    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (5, 6)))
    _, backward = halves(products, x, weight)
    assert backward[hetu.gathered_products.default] == 1
    assert backward[hetu.gathered_products_backward.default] == 1


def test_what_is_drawn_is_not_drawn_again() -> None:
    def dropped(graph: fx.Graph, x: fx.Node) -> Sequence[Any]:
        kept = graph.call_function(aten.dropout.default, (graph.call_function(aten.exp.default, (x,)), 0.5, True))
        return [kept]

    x = torch.randn(64, requires_grad=True)
    torch.manual_seed(0)
    with budget(activation_memory_budget=0.0):
        (found,) = lower(module_of(1, dropped), "aot_eager")(x)
    found.sum().backward()
    assert 0 < int((found == 0).sum()) < 64
    torch.testing.assert_close(x.grad, found.detach())


def test_another_budget_has_another_graph_and_the_first_comes_back() -> None:
    def products(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> Sequence[Any]:
        return [graph.call_function(aten.tanh.default, (graph.call_function(aten.linear.default, (x, weight)),))]

    compiler = Recorder()
    function, x, weight = (
        lower(module_of(2, products), compiler),
        torch.randn(4, 6),
        torch.randn(5, 6, requires_grad=True),
    )
    for most, graphs in ((1.0, 2), (0.0, 4), (1.0, 4)):
        with budget(activation_memory_budget=most):
            torch.autograd.grad(function(x, weight)[0].sum(), weight)
        assert len(compiler.graphs) == graphs
