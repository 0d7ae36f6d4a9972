"""Nets that compute with complex numbers: Fourier operators, diagonal state spaces, rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families.batches import CLASSES, VOCABULARY


class SpectralConv(nn.Module):
    """Multiplies the low frequencies of a field by complex weights, and leaves out the high ones (FNO).

    Args:
        channels: of what comes in and goes out.
        modes: the frequencies in each of two dims.
        is_real: the weights are stored as pairs of real numbers, as neuralop and Apex do.
    """

    def __init__(self, channels: int, modes: int, *, is_real: bool) -> None:
        super().__init__()
        self.modes, self.is_real = modes, is_real
        shape = (2, channels, channels, modes, modes, 2)
        pairs = torch.rand(shape) / channels
        self.weights = nn.Parameter(pairs if is_real else torch.view_as_complex(pairs))

    def forward(self, x: Tensor) -> Tensor:
        """Filter a field: rows, channels, height, width."""
        m, low = self.modes, torch.fft.rfft2(x)
        weights = torch.view_as_complex(self.weights) if self.is_real else self.weights
        made = torch.zeros_like(low)
        made[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", low[:, :, :m, :m], weights[0])
        made[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", low[:, :, -m:, :m], weights[1])
        filtered: Tensor = torch.fft.irfft2(made, s=(x.size(-2), x.size(-1)))
        return filtered


class FourierOperator(nn.Module):
    """Lifts a field and its coordinates to channels, filters and mixes them in layers, and projects them back."""

    def __init__(self, channels: int = 8, modes: int = 4, *, is_real: bool = False) -> None:
        super().__init__()
        self.lift = nn.Linear(4, channels)
        self.filters = nn.ModuleList(SpectralConv(channels, modes, is_real=is_real) for _ in range(2))
        self.mixers = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.project = nn.Sequential(nn.Linear(channels, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, field: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Give the field that comes out and the mean squared error."""
        height, width = field.shape[-2:]
        down, across = torch.linspace(0, 1, height, dtype=field.dtype), torch.linspace(0, 1, width, dtype=field.dtype)
        places = torch.stack(torch.meshgrid(down, across, indexing="ij")).expand(field.size(0), -1, -1, -1)
        x = self.lift(torch.cat([field, places], 1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for filter_, mixer in zip(self.filters, self.mixers, strict=True):
            x = functional.gelu(filter_(x) + mixer(x))
        made = self.project(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return {"loss": functional.mse_loss(made, target), "field": made}


class DiagonalStateSpace(nn.Module):
    """A long convolution whose kernel is a sum of damped oscillations (S4D), computed by Fourier transforms.

    Args:
        channels: of what comes in and goes out.
        states: oscillations per channel.
    """

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.linspace(-3.0, -1.0, channels))
        self.weights = nn.Parameter(torch.randn(channels, states, 2) * 0.5)
        self.log_decay = nn.Parameter(torch.full((channels, states), 0.5).log())
        self.frequency = nn.Parameter(torch.pi * torch.arange(states).repeat(channels, 1).float())
        self.skip = nn.Parameter(torch.randn(channels))
        self.mix = nn.Sequential(nn.GELU(), nn.Conv1d(channels, 2 * channels, 1), nn.GLU(dim=-2))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a signal: rows, channels, length."""
        length = x.size(-1)
        kernel = torch.fft.rfft(self._kernel(length), n=2 * length)
        convolved = torch.fft.irfft(torch.fft.rfft(x, n=2 * length) * kernel, n=2 * length)[..., :length]
        mixed: Tensor = self.mix(convolved + x * self.skip.unsqueeze(-1))
        return mixed

    def _kernel(self, length: int) -> Tensor:
        step, rate = self.log_step.exp().unsqueeze(-1), torch.complex(-self.log_decay.exp(), self.frequency)
        grown = (rate * step).unsqueeze(-1) * torch.arange(length, device=step.device)
        weights = torch.view_as_complex(self.weights) * ((rate * step).exp() - 1.0) / rate
        return 2 * torch.einsum("hn,hnl->hl", weights, grown.exp()).real


class StateSpaces(nn.Module):
    """Signals through two diagonal state spaces, each added to its input and normed; the average is put in classes."""

    def __init__(self, channels: int = 12, states: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, channels)
        self.layers = nn.ModuleList(DiagonalStateSpace(channels, states) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, signal: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores per class and the mean cross-entropy."""
        x = self.encoder(signal).transpose(-1, -2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm((x + layer(x)).transpose(-1, -2)).transpose(-1, -2)
        logits = self.head(x.mean(dim=-1))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class RotatedAttention(nn.Module):
    """Attention with grouped keys whose queries and keys are turned as complex numbers (the reference Llama)."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Attend to what came before."""
        rows, length, _ = x.shape
        query, key = self._turned(self.wq(x), turns), self._turned(self.wk(x), turns)
        key, value = (self._repeated(part) for part in (key, self.wv(x).view(rows, length, self.groups, self.size)))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.wo(mixed.transpose(1, 2).reshape(rows, length, -1))
        return attended

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        rows, length, _ = x.shape
        pairs = torch.view_as_complex(x.view(rows, length, -1, self.size // 2, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    def _repeated(self, x: Tensor) -> Tensor:
        rows, length, groups, size = x.shape
        times = self.heads // groups
        return x[:, :, :, None].expand(rows, length, groups, times, size).reshape(rows, length, self.heads, size)


class RotatedLlama(nn.Module):
    """A small Llama whose positions are rotations by complex numbers."""

    rates: Tensor

    def __init__(self, width: int = 48, heads: int = 8, groups: int = 4) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(5))
        self.attentions = nn.ModuleList(RotatedAttention(width, heads, groups) for _ in range(2))
        self.gates, self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(2))
            for sizes in ((width, 40), (width, 40), (40, width))
        )
        half = width // heads // 2
        self.register_buffer("rates", 1.0 / 10000 ** (torch.arange(half).float() / half))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Predict each next token; give scores and the mean cross-entropy of the labels that count."""
        angles = torch.outer(torch.arange(input_ids.size(1), device=input_ids.device), self.rates)
        turns, x = torch.polar(torch.ones_like(angles), angles), self.tokens(input_ids)
        for number, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * number](x), turns)
            y = self.norms[2 * number + 1](x)
            x = x + self.downs[number](functional.silu(self.gates[number](y)) * self.ups[number](y))
        logits = self.head(self.norms[4](x))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def fno_of_pairs() -> nn.Module:
    """The Fourier operator whose complex weights are stored as real pairs."""
    return FourierOperator(is_real=True)


FIELDS: Mapping[str, Callable[[], nn.Module]] = {"net: fno": FourierOperator, "net: fno (pairs)": fno_of_pairs}
SIGNALS: Mapping[str, Callable[[], nn.Module]] = {"net: s4d": StateSpaces}
ROTATED: Mapping[str, Callable[[], nn.Module]] = {"net: complex rotary": RotatedLlama}
