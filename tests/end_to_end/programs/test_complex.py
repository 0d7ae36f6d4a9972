"""Complex numbers carry gradients between devices: everything trains as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.base.dtypes import as_reals, in_double
from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

functional = nn.functional
PLANS = {
    "DP 3:1": Plan.data_parallel((0, 1), (3, 1)),
    "TP2": Plan((Pipeline((Stage((0, 1)),)),)),
    "TP 2:1 + 1": Plan((Pipeline((Stage((0, 1), (2, 1)),), share=3), Pipeline((Stage((2,)),)))),
    "PP2": Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
}


class Products(nn.Module):
    """Complex weights in linear layers, whose gradients have the conjugates of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up = nn.Parameter(torch.randn(12, 4, dtype=torch.cfloat))
        self.bias = nn.Parameter(torch.randn(12, dtype=torch.cfloat))
        self.down = nn.Parameter(torch.randn(4, 12, dtype=torch.cfloat))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(torch.tanh(self.first(x)).unflatten(-1, (4, 2)))
        h = functional.linear(h, self.up, self.bias)
        h = functional.linear(h * h.abs().tanh() + h.conj() * h.angle().sin(), self.down)
        return self.last(torch.view_as_real(h).flatten(-2))


class Rotary(nn.Module):
    """Rotary embeddings by complex numbers, of queries and of keys apart."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(8, size) for size in (8, 8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (2, 4)) for layer in (self.query, self.key, self.value))
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), 100.0 ** -torch.arange(0, 1, 0.5)).to(x.dtype)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        query, key = (self.turned(tensor, turns) for tensor in (query, key))
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return self.last(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    @staticmethod
    def turned(tensor: Tensor, turns: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(tensor.unflatten(-1, (2, 2))) * turns).flatten(-2)


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: few frequencies, each with complex weights."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.real = real
        self.first, self.beside, self.last = nn.Linear(8, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 3)
        self.weight = nn.Parameter(0.3 * torch.randn(6, 6, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).transpose(1, 2)
        there, back = (torch.fft.rfft, torch.fft.irfft) if self.real else (torch.fft.fft, torch.fft.ifft)
        waves = there(h)
        few = torch.einsum("bix,iox->box", waves[..., :3], self.weight)
        made = back(torch.cat([few, torch.zeros_like(waves[..., 3:])], -1), n=h.shape[-1])
        made = made if self.real else made.real + 0.5 * made.imag
        return self.last(functional.gelu(made + self.beside(h)).transpose(1, 2))


class StateSpace(nn.Module):
    """A diagonal state space layer (S4D): its kernel is made of complex exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.out = nn.Parameter(torch.randn(6, 4, 2))
        self.step, self.skip = nn.Parameter(torch.rand(6) - 2), nn.Parameter(torch.randn(6))
        self.decay = nn.Parameter(torch.full((6, 4), -0.7))
        self.turn = nn.Parameter(3.14 * torch.arange(4.0).repeat(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        u, states = self.first(x).transpose(1, 2), -self.decay.exp() + 1j * self.turn
        length, slow = x.shape[1], states * self.step.exp().unsqueeze(-1)
        powers = torch.exp(slow.unsqueeze(-1) * torch.arange(length, device=x.device))
        weights = torch.view_as_complex(self.out.contiguous()) * (slow.exp() - 1.0) / states
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        waves = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        made = torch.fft.irfft(waves, n=2 * length)[..., :length] + u * self.skip.unsqueeze(-1)
        return self.last(functional.gelu(made).transpose(1, 2))


MODELS = {
    "complex products": Products,
    "complex rotary embeddings": Rotary,
    "a Fourier operator of real waves": lambda: Fourier(real=True),
    "a Fourier operator of complex waves": lambda: Fourier(real=False),
    "a state space layer": StateSpace,
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.model(x), target)


def in_double_precision(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(in_double(parameter.dtype))
    return model


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_complex_numbers_train_as_on_one_device(name: str, plan: str) -> None:
    torch.manual_seed(5)
    model = in_double_precision(WithLoss(MODELS[name]()))
    double = {"dtype": torch.float64}
    batches = [{"x": torch.randn(8, 10, 8, **double), "target": torch.randn(8, 10, 3, **double)} for _ in range(2)]
    how = Lockstep()
    alone = train_alone(model, batches, how)
    verdict = judge(plan, alone, how.train(model, batches, PLANS[plan]), 1e-10, "")
    assert verdict.verdict == "equal", verdict


class Pairs(nn.Module):
    """Numbers that are read as pairs; a trace of such as lie one behind the other has no copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        return self.last(torch.tanh(self.first(torch.view_as_real(pairs * pairs).flatten(-2))))


ORDERS = {"rows first": (0, 1, 2), "rows last": (1, 2, 0), "pairs apart": (2, 0, 1)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_may_lie_otherwise_in_memory_than_the_one_before(order: str, plan: str) -> None:
    torch.manual_seed(5)
    model, double = in_double_precision(WithLoss(Pairs())), {"dtype": torch.float64}
    batches = [{"x": torch.randn(8, 10, 8, **double), "target": torch.randn(8, 10, 3, **double)} for _ in range(2)]
    dims = ORDERS[order]
    batches[1]["x"] = batches[1]["x"].permute(dims).contiguous().permute([dims.index(dim) for dim in range(3)])
    alone = train_alone(model, batches, Lockstep())
    verdict = judge(plan, alone, Lockstep().train(model, batches, PLANS[plan]), 1e-10, "")
    assert verdict.verdict == "equal", verdict


class FewChannels(nn.Module):
    """Waves of fewer channels than there are devices, made of more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(5, 2, 5, dtype=torch.cfloat))
        self.up, self.down, self.back, self.last = map(nn.Linear, (8, 12, 16, 40), (12, 8, 40, 3))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.fft.irfft(torch.einsum("bik,iok->bok", torch.fft.rfft(x), self.weight), n=8)
        made = made + self.down(functional.gelu(self.up(made)))
        return self.last((x + self.back(made.flatten(1)).view(-1, 5, 8)).flatten(1))


def test_a_device_without_channels_transforms_none() -> None:
    torch.manual_seed(5)
    model, double = in_double_precision(WithLoss(FewChannels())), {"dtype": torch.float64}
    batches = [{"x": torch.randn(4, 5, 8, **double), "target": torch.randn(4, 3, **double)} for _ in range(2)]
    plan = Plan((Pipeline((Stage((0, 1, 2)),)),), sequence_parallel=True)
    verdict = judge("", train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_a_difference_in_imaginary_parts_alone_is_seen() -> None:
    model = in_double_precision(WithLoss(Products()))
    given = [{"x": torch.randn(4, 10, 8, dtype=torch.float64), "target": torch.randn(4, 10, 3, dtype=torch.float64)}]
    alone, other = (train_alone(model, given, Lockstep()) for _ in range(2))
    assert judge("", alone, other, 1e-10, "").verdict == "equal"
    as_reals(other.steps[0].gradients["model.up"])[..., 1] *= 1.5
    verdict = judge("", alone, other, 1e-10, "")
    assert (verdict.verdict, verdict.steps[0].worst_gradient) == ("differs", "model.up")
