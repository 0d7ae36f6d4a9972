"""What torch's export refuses by itself, and is captured: it trains as on one device under every plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.planner.gathered_ops import gathered_ops
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce

PLANS = {
    "alone": Plan.single(),
    "rows 3:1": Plan.data_parallel((0, 1), (3, 1)),
    "tensor parallel": Plan.tensor_parallel((0, 1), (3, 1)),
    "[0,1] beside [2]": Plan((Pipeline((Stage((0, 1), (3, 1)),), share=2), Pipeline((Stage((2,)),)))),
    "a pipeline of two": Plan((Pipeline((Stage((0,)), Stage((1,)))),)),
}


class Averages(nn.Module):
    """Norms that average their statistics over all batches, of vectors and of images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.of_images = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=None)
        self.layer, self.of_vectors = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, momentum=None, affine=False)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        image = torch.cat([x[:, :1, None] * x[:, None], x[:, 1:2, None] * x[:, None]], 1)[..., None].expand(
            -1, -1, -1, 3
        )
        h = self.of_images(self.conv(image)).tanh().mean((2, 3))
        return mse_loss(self.last(self.of_vectors(self.layer(h)).tanh()).squeeze(-1), y)


class Energy(nn.Module):
    """An energy of positions, and what is learned of its forces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        energy = self.layers(x).squeeze(-1)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return mse_loss(energy, y) + (forces + x.detach()).square().mean()


class Attends(Energy):
    """Forces through attention, a norm and embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 6), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = x[:, None] * self.table(torch.arange(5))
        places.requires_grad_()
        made, _ = self.attention(places, places, places)
        energy = self.layers(self.norm(made + places)).sum((1, 2))
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return mse_loss(energy, y) + forces.square().mean()


class Bends(Energy):
    """Second derivatives, as of a differential equation that is to hold."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        at = x.detach().clone().requires_grad_()
        u = self.layers(at).squeeze(-1)
        (slope,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return (bend[:, 0] - u).square().mean() + (slope[:, 1] - y).square().mean()


class Steers(Energy):
    """Takes a step against a gradient that is a constant to the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        energy = self.layers(x).squeeze(-1)
        (slope,) = torch.autograd.grad(energy.exp().sum(), x, retain_graph=True)
        return mse_loss(self.layers(x - 0.1 * slope).squeeze(-1), y) + energy.mean()


class Weighs(Energy):
    """Is held to a slope in its parameters (a penalty on the gradient's norm)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(self.layers(x).squeeze(-1), y)
        slopes = torch.autograd.grad(loss, [self.layers[0].weight, self.layers[4].weight], create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)


class Criticises(Energy):
    """Is held to slopes of one through a norm over the batch, as a critic is by its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        made = self.layers(torch.tanh(self.norm(self.first(x)))).squeeze(-1)
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return mse_loss(made, y) + (slope.norm(dim=1) - 1).square().mean()


class OfForcesAlone(Energy):
    """Learns of forces alone, of an energy with a distance in it: the last bias has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        places = self.norm(x)
        energy = self.layers(places).sum() + mse_loss(places, torch.zeros_like(x), reduction="sum")
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return (forces + x.detach()).square().mean()


KINDS = (Averages, Energy, Attends, Bends, Steers, Weighs, Criticises, OfForcesAlone)


def batches(number: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    rows = (8, 5, 7)[:number]
    return [
        {"x": torch.randn(n, 6, generator=source).double(), "y": torch.randn(n, generator=source).double()}
        for n in rows
    ]


def model_of(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_export_refuses_trains_as_on_one_device(kind: type[nn.Module], plan: str) -> None:
    model, how = model_of(kind), Lockstep()
    alone, made = train_alone(model, batches(3), how), how.train(model, batches(3), PLANS[plan])
    verdict = judge("", alone, made, 1e-10, "")
    assert verdict.verdict == "equal", verdict
    for name, value in alone.state.items():
        torch.testing.assert_close(made.state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_derivative_does_not_use_has_no_gradient(plan: str) -> None:
    model, how = model_of(OfForcesAlone), Lockstep(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3))
    alone, made = train_alone(model, batches(2), how), how.train(model, batches(2), PLANS[plan])
    assert "layers.4.bias" not in alone.steps[0].gradients
    assert made.steps[0].gradients.keys() == alone.steps[0].gradients.keys()
    for name, value in alone.state.items():
        torch.testing.assert_close(made.state[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Energy, Bends, OfForcesAlone])
def test_rows_of_forces_are_apart(kind: type[nn.Module]) -> None:
    program = Programs(model_of(kind), None).first(batches(1)[0], training=True)
    deduced = Deduce()(Annotate(PLANS["rows 3:1"], wants_values=False)(program.analysed))
    assert not gathered_ops(deduced, PLANS["rows 3:1"])
