"""A DCGAN: two networks with batch norms, two optimizers, a discriminator that is trained on real and made pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hetu_fx
from tests.scripts.repositories.resnet import images
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup

NOISE = 6


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, bias=False), nn.Flatten(0),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


def weights_init(m: nn.Module) -> None:
    name = m.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(m.weight, 0.0, 0.2)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.constant_(m.bias, 0)


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__ or "", lr=2e-3).parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train = loader(images(24, seed=1), args, rank, world)
    net_g, net_d = Generator().apply(weights_init), Discriminator().apply(weights_init)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=args.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    noise = torch.Generator().manual_seed(args.seed + 1)

    def draw() -> Tensor:
        return torch.randn(args.batch_size, NOISE, 1, 1, generator=noise)[rank::world]

    if args.plan:
        example = next(iter(train))[0]
        net_d = hetu_fx.auto_parallelize(net_d, (example,), optimizer=optimizer_d, plan=args.plan)
        net_g = hetu_fx.auto_parallelize(
            net_g, (torch.zeros(len(example), NOISE, 1, 1),), optimizer=optimizer_g, plan=args.plan
        )
    fixed = draw()

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        for real, _ in train:
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            net_d.zero_grad()
            output_real = net_d(real)
            real_loss = criterion(output_real, 0.9 * ones)
            real_loss.backward()
            fake = net_g(draw())
            output_fake = net_d(fake.detach())
            fake_loss = criterion(output_fake, zeros)
            fake_loss.backward()
            optimizer_d.step()

            net_g.zero_grad()
            output = net_d(fake)
            loss_g = criterion(output, ones)
            loss_g.backward()
            norm = nn.utils.clip_grad_norm_(net_g.parameters(), args.clip)
            optimizer_g.step()
            log(
                loss_d=average(real_loss + fake_loss), loss_g=average(loss_g), norm=norm.item(),
                d_x=average(torch.sigmoid(output_real).mean()), d_g=average(torch.sigmoid(output_fake).mean()),
            )  # fmt: skip
        net_g.eval()
        with torch.no_grad():
            pictures = net_g(fixed)
        net_g.train()
        log(epoch=epoch, mean=average(pictures.mean()), spread=average(pictures.square().mean()))
    models = {"model": {f"{n}.{k}": v for n, m in (("g", net_g), ("d", net_d)) for k, v in m.state_dict().items()}}
    save(args.out / "ckpt.pt", rank, **models, g=optimizer_g.state_dict(), d=optimizer_d.state_dict())


if __name__ == "__main__":
    main()
