"""A ResNet with mixup: batches of two loaders are mixed, the loop computes the loss, the best model is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hetu_fx
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup, total

CLASSES = 4


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, CLASSES)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.constant_(m.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def images(count: int, seed: int) -> TensorDataset:
    """Return pictures of noise with a bright quarter, which is the label."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(count, 3, 8, 8, generator=generator)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[:, 4 * (label // 2) :, 4 * (label % 2) :][:, :4, :4] += 1
    return TensorDataset(pictures, labels)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__ or "", lr=0.05, clip=5.0)
    parser.add_argument("--alpha", type=float, default=0.4)
    args = parser.parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train, test = images(32, seed=1), images(12, seed=2)
    first, second = (loader(train, args, rank, world) for _ in range(2))
    validation = loader(test, args, rank, world, train=False)
    model = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(first), pct_start=0.25
    )
    if args.plan:
        model = hetu_fx.auto_parallelize(model, (next(iter(first))[0],), optimizer=optimizer, plan=args.plan)

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        first.sampler.set_epoch(2 * epoch)
        second.sampler.set_epoch(2 * epoch + 1)
        for (x_a, y_a), (x_b, y_b) in zip(first, second, strict=True):
            lam = float(np.random.beta(args.alpha, args.alpha))
            outputs = model(lam * x_a + (1 - lam) * x_b)
            loss = lam * criterion(outputs, y_a) + (1 - lam) * criterion(outputs, y_b)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            predicted = outputs.argmax(dim=1)
            correct = lam * predicted.eq(y_a).double().mean() + (1 - lam) * predicted.eq(y_b).double().mean()
            log(loss=average(loss), norm=norm.item(), lr=scheduler.get_last_lr(), accuracy=average(correct))
        model.eval()
        summed = seen = right = 0.0
        with torch.no_grad():
            for x, y in validation:
                outputs = model(x)
                summed += criterion(outputs, y).item() * len(y)
                right += (outputs.argmax(1) == y).sum().item()
                seen += len(y)
        summed, right, seen = total(summed, right, seen)
        log(epoch=epoch, test_loss=summed / seen, test_accuracy=right / seen)
        if right / seen >= best:
            best = right / seen
            save(args.out / "best.pt", rank, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch)
    save(args.out / "ckpt.pt", rank, model=model.state_dict(), scheduler=scheduler.state_dict())


if __name__ == "__main__":
    main()
