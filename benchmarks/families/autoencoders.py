"""Autoencoders of images: one that draws its code, one whose code is the nearest of a book."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


def encoder(outputs: int) -> nn.Sequential:
    """Make convolutions that shrink an image of 32 to 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 4, 2, 1), nn.ReLU(), nn.Conv2d(12, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, outputs, 1)
    )


def decoder(inputs: int) -> nn.Sequential:
    """Make convolutions that bring it back."""
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, 12, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(12, 3, 4, 2, 1), nn.Tanh()
    )


class Vae(nn.Module):
    """A variational autoencoder: the code is drawn around a mean, and pays for what it tells."""

    def __init__(self, code: int = 10) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(4), decoder(4)
        self.mean, self.log_variance = nn.Linear(256, code), nn.Linear(256, code)
        self.back = nn.Linear(code, 256)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Give the image again, and the mean over rows of its error and of the code's divergence."""
        found = self.encoder(pixel_values).flatten(1)
        mean, log_variance = self.mean(found), self.log_variance(found)
        spread = torch.exp(0.5 * log_variance)
        code = mean + torch.randn_like(spread) * spread
        made = self.decoder(self.back(code).view(-1, 4, 8, 8))
        error = functional.mse_loss(made, pixel_values, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return {"loss": (error + divergence) / pixel_values.size(0), "image": made}


class VqVae(nn.Module):
    """A vector-quantised autoencoder: each place of the code is the nearest vector of a learned book."""

    def __init__(self, width: int = 8, book: int = 20) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(width), decoder(width)
        self.book = nn.Embedding(book, width)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Give the image again and its error, with what draws the book to the codes and the codes to the book."""
        found = self.encoder(pixel_values).permute(0, 2, 3, 1)
        flat = found.reshape(-1, found.size(-1))
        apart = flat.pow(2).sum(1, keepdim=True) + self.book.weight.pow(2).sum(1) - 2 * flat @ self.book.weight.t()
        nearest = self.book(apart.argmin(1)).view(found.shape)
        commitment = functional.mse_loss(nearest.detach(), found)
        drawn = functional.mse_loss(nearest, found.detach()) + 0.25 * commitment
        passed = found + (nearest - found).detach()
        made = self.decoder(passed.permute(0, 3, 1, 2))
        return {"loss": functional.mse_loss(made, pixel_values) + drawn, "image": made}


AUTOENCODERS: Mapping[str, Callable[[], nn.Module]] = {"net: vae": Vae, "net: vq-vae": VqVae}
