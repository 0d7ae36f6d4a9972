"""A forecaster of series that an IterableDataset makes as they are asked for, shared out to processes and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import hetu_fx
from tests.scripts.repositories.utils import Log, average, options, save, setup

LENGTH, AHEAD = 12, 2


class Series(IterableDataset[tuple[Tensor, Tensor]]):
    """Sums of two waves, one after another; each process, and each worker of it, makes every so-many-th."""

    def __init__(self, count: int, seed: int, rank: int, world: int) -> None:
        self.count, self.seed, self.rank, self.world = count, seed, rank, world
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        times = torch.arange(LENGTH + AHEAD, dtype=torch.get_default_dtype())
        for number in range(self.count):
            rates, shifts = torch.rand(2, 2, 1, generator=generator)
            if number % (self.world * workers) == self.rank * workers + worker:
                wave = torch.sin(rates * times + 6 * shifts).sum(0)
                yield wave[:LENGTH, None], wave[LENGTH:]


class Forecaster(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, width, 3, padding=1)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, AHEAD))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        out, _ = self.rnn(h)
        prediction = self.head(out[:, -1])
        if y is None:
            return {"prediction": prediction}
        return {"prediction": prediction, "loss": nn.functional.smooth_l1_loss(prediction, y)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__ or "", lr=5e-3)
    parser.add_argument("--series", type=int, default=28, help="of an epoch; the last batch may have fewer")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train, test = Series(args.series, 1, rank, world), Series(8, 1000, rank, world)
    loaders = [DataLoader(one, args.batch_size // world, num_workers=args.workers) for one in (train, test)]
    model = Forecaster()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    if args.plan:
        model = hetu_fx.auto_parallelize(model, next(iter(loaders[0])), optimizer=optimizer, plan=args.plan)

    for epoch in range(args.epochs):
        train.epoch = epoch
        model.train()
        for x, y in loaders[0]:
            loss = model(x, y)["loss"]
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            log(loss=loss.item(), norm=norm.item())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for x, y in loaders[1]:
                error = average((model(x)["prediction"] - y).abs().mean())
                log(epoch=epoch, error=error, lr=scheduler.get_last_lr())
        save(args.out / "ckpt.pt", rank, model=model.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    main()
