"""A ViT with label smoothing and layer-wise learning rates; its criterion is given as hetu_fx's docs say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hetu_fx
from tests.scripts.repositories.resnet import CLASSES, images
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup, total


class ViT(nn.Module):
    def __init__(self, image: int = 8, patch: int = 4, width: int = 16, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def param_groups(model: ViT, lr: float, decay: float = 0.75) -> list[dict[str, object]]:
    """Return a group for each layer, the rate of which falls towards the input."""
    layers = [nn.ModuleList([model.norm, model.head]), *reversed(list(model.blocks.layers)), model.patch_embed]
    groups = [{"params": list(layer.parameters()), "lr": lr * decay**i} for i, layer in enumerate(layers)]
    return [*groups, {"params": [model.cls_token, model.pos_embed], "lr": lr, "weight_decay": 0.0}]


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__ or "").parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train = loader(images(32, seed=1), args, rank, world)
    validation = loader(images(12, seed=2), args, rank, world, train=False)
    model = ViT()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(param_groups(model, args.lr), weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train) * args.epochs - 2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    if args.plan:
        model = hetu_fx.auto_parallelize(
            model, next(iter(train)), optimizer=optimizer, plan=args.plan, loss_fn=criterion
        )

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        model.eval()
        if rank == 0:
            x, y = validation.dataset[:3]
            with torch.no_grad():
                loss = model(x, y).loss if args.plan else criterion(model(x), y)
                log(epoch=epoch, first_loss=loss.item(), first=model(x).argmax(1).tolist())
        model.train()
        for x, y in train:
            loss = model(x, y).loss if args.plan else criterion(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log(loss=loss.item(), norm=norm.item(), lr=scheduler.get_last_lr())
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for x, y in validation:
                logits = model(x)
                right += int((logits.argmax(1) == y).sum())
                seen += len(y)
        right, seen = total(right, seen)
        weight = model.head.weight.detach()
        log(epoch=epoch, accuracy=right / seen, weight_norm=weight.norm().item(), mean=average(weight.mean()))
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save(args.out / "ckpt.pt", rank, **states, epoch=epoch)


if __name__ == "__main__":
    main()
