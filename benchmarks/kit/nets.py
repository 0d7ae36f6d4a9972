"""Nets that program searches are asked about: one kind of work each, or several that want to be cut otherwise."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, interpolate, max_pool2d, scaled_dot_product_attention


class Mlp(nn.Module):
    """Layers of two products each, with a residual."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


class Convolutions(nn.Module):
    """Convolutions of growing width, then two large products: most work in front, most parameters behind."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256]
        steps = itertools.pairwise(widths)
        parts = [m for a, b in steps for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
        self.features = nn.Sequential(*parts)
        self.head = nn.Sequential(nn.Linear(256 * 16, 4096), nn.ReLU(), nn.Linear(4096, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1)).pow(2).mean()


class Autoencoder(nn.Module):
    """Convolutions on both sides of one product as wide as what is between them: little work, most parameters."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        narrow = width // 64
        down = [(3, channels), (channels, channels), (channels, narrow)]
        up = [(narrow, channels), (channels, channels), (channels, 3)]
        self.down = nn.Sequential(*(m for a, b in down for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())))
        self.middle = nn.Linear(width, width)
        self.up = nn.Sequential(*(m for a, b in up for m in (nn.ReLU(), nn.Conv2d(a, b, 3, padding=1))))

    def forward(self, x: Tensor) -> Tensor:
        code = max_pool2d(self.down(x), 4)
        made = self.middle(code.flatten(1)).view(code.shape)
        return (self.up(interpolate(made, scale_factor=4)) - x).pow(2).mean()


class Experts(nn.Module):
    """Feed-forward experts of which each row takes all, weighted: products over an expert dim."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.router = nn.Linear(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = torch.relu(torch.einsum("bsk,eko->ebso", x, self.up))
        return torch.einsum("ebsk,bse->bsk", torch.einsum("ebso,eok->ebsk", hidden, self.down), weights).pow(2).mean()


class BertLayer(nn.Module):
    """Attention, and a feed-forward: of one width, or of experts of which each token takes all, weighted."""

    def __init__(self, width: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.is_mixed = heads, bool(experts)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        if experts:
            self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
            self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
            self.router = nn.Linear(width, experts)
        else:
            self.up_product, self.down_product = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = (project(x).view(rows, tokens, self.heads, -1) for project in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        x = self.norms[0](x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width)))
        return self.norms[1](x + (self._mixture(x) if self.is_mixed else self._feed_forward(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_product(gelu(self.up_product(x)))
        return made

    def _mixture(self, x: Tensor) -> Tensor:
        hidden = gelu(torch.einsum("bsk,eko->ebso", x, self.up))
        made, weights = torch.einsum("ebso,eok->ebsk", hidden, self.down), self.router(x).softmax(-1)
        return torch.einsum("ebsk,bse->bsk", made, weights)


class BertMoe(nn.Module):
    """BERT with experts in every second layer (HAP, EuroSys 2024, section 7.1)."""

    def __init__(self, width: int, layers: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(BertLayer(width, width // 64, experts * (i % 2)) for i in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
