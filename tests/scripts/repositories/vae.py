"""A VAE: noise for the reparameterization, a KL term that is annealed, a plateau schedule, samples of the decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hetu_fx
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup

PIXELS, LATENT = 24, 3


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a few shapes, each with the noise that it is encoded with, so that a run can be repeated."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = torch.rand(4, PIXELS, generator=generator)
        kinds = torch.randint(0, 4, (count,), generator=generator)
        self.rows = (shapes[kinds] + 0.1 * torch.randn(count, PIXELS, generator=generator)).clamp(0, 1)
        self.noise = torch.randn(count, LATENT, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.noise[index]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 16), nn.ReLU())
        self.mu, self.logvar = nn.Linear(16, LATENT), nn.Linear(16, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, PIXELS))

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor | None) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + (torch.randn_like(std) if eps is None else eps) * std

    def forward(self, x: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.reparameterize(mu, logvar, eps)), mu, logvar


def vae_loss(recon: Tensor, x: Tensor, mu: Tensor, logvar: Tensor, beta: float) -> Tensor:
    """Return the loss of a batch, as the mean of its rows."""
    bce = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (bce + beta * kld) / len(x)


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__ or "", lr=1e-2).parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train, test = (loader(Digits(32, 1), args, rank, world), loader(Digits(16, 2), args, rank, world, train=False))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    if args.plan:
        model = hetu_fx.auto_parallelize(model, next(iter(train)), optimizer=optimizer, plan=args.plan)

    step = 0
    for epoch in range(args.epochs):
        model.train()
        train.sampler.set_epoch(epoch)
        for x, eps in train:
            step += 1
            recon, mu, logvar = model(x, eps)
            loss = vae_loss(recon, x, mu, logvar, beta=min(1.0, step / 4))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), args.clip)
            optimizer.step()
            mse = F.mse_loss(torch.sigmoid(recon.detach()), x)
            log(loss=average(loss), mse=average(mse), kl=average(0.5 * (mu**2 + logvar.exp() - 1 - logvar).mean()))
        model.eval()
        losses = []
        with torch.no_grad():
            for x, eps in test:
                losses.append(vae_loss(*model(x, eps)[:1], x, *model(x, eps)[1:], beta=1.0).item())
        (test_loss,) = average(sum(losses) / len(losses))
        scheduler.step(test_loss)
        log(epoch=epoch, test_loss=test_loss, lr=optimizer.param_groups[0]["lr"])
        with torch.no_grad():
            z = torch.linspace(-1, 1, 2 * LATENT).view(2, LATENT)
            log(samples=torch.sigmoid(model.decoder(z)).flatten().tolist())
    save(args.out / "ckpt.pt", rank, model=model.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    main()
