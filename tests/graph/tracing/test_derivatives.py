"""Derivatives that a forward takes are captured as ops, and have derivatives themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from tests.graph.compare import assert_same_as_eager

Energy = Callable[["Net", Tensor], Tensor]


class Exponential(torch.autograd.Function):
    """Keeps its result for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.exp()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return gradient * made


class Net(nn.Module):
    """Squares the slope of an energy."""

    def __init__(self, energy: Energy) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1))
        self.norm, self.conv, self.recurrent = nn.LayerNorm(6), nn.Conv1d(1, 4, 3), nn.GRU(6, 5, batch_first=True)
        self.table, self.energy = nn.Parameter(torch.randn(4, 6)), energy

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().clone().requires_grad_()
        energy = self.energy(self, at)
        (slope,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
        return slope.square().mean() + energy.mean()


ENERGIES: dict[str, Energy] = {
    "norm": lambda net, x: net.layers(net.norm(x)),
    "convolution": lambda net, x: net.conv(x[:, None]).tanh().sum((1, 2)),
    "recurrent": lambda net, x: net.recurrent(x[:, None] * net.table)[0].sum((1, 2)),
    "attention": lambda net, x: F.scaled_dot_product_attention(*[x[:, None] * net.table] * 3).sum((1, 2)),
    "in place": lambda net, x: net.layers(x).exp_().mul(2).add_(1),
    "constants": lambda net, x: net.layers(x) * net.layers(x).detach() + torch.no_grad()(net.layers)(x),
    "reductions": lambda net, x: x.prod(1) + x.softmax(-1).amax(1) + torch.linalg.norm(x @ net.table.t(), dim=1),
    "torch.func": lambda net, x: torch.func.grad(lambda at: net.layers(at).exp().sum())(x).square().sum(1),
    "a function that keeps its result": lambda net, x: Exponential.apply(net.layers(x)),
}


@pytest.mark.parametrize("name", ENERGIES)
def test_a_slope_has_its_own_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = Net(ENERGIES[name]).double()
    batch = {"x": torch.randn(7, 6).double()}
    assert_same_as_eager(model, capture(model, batch), batch, 1e-10)


def _of_modules(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.layers, x, use_reentrant=False)  # type: ignore[no-any-return]


def _of_ops(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda at: torch.tanh(at @ net.table.t()).exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("energy", [_of_modules, _of_ops])
def test_what_is_computed_again_for_a_derivative_is_refused(energy: Energy) -> None:
    with pytest.raises(CaptureError, match="hint: "):
        capture(Net(energy), {"x": torch.randn(7, 6)})


class Keeps(Net):
    """Forms no graph of its slope, so that the loss has no gradient of it."""

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().clone().requires_grad_()
        energy = self.energy(self, at)
        (slope,) = torch.autograd.grad(energy.sum(), at, retain_graph=True)
        assert not slope.requires_grad
        return (slope * self.table[0]).mean() + energy.mean()


def test_a_slope_without_a_graph_is_a_constant() -> None:
    torch.manual_seed(0)
    model = Keeps(ENERGIES["norm"]).double()
    batch = {"x": torch.randn(7, 6).double()}
    assert_same_as_eager(model, capture(model, batch), batch, 1e-10)
