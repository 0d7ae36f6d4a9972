"""A small DETR: convolutions, a transformer with queries, Hungarian matching in numpy, a loss over matched boxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hetu_fx
from tests.scripts.repositories.utils import Log, average, loader, options, save, setup

Target = dict[str, Tensor]
CLASSES, QUERIES = 3, 5


class Boxes(Dataset[tuple[Tensor, Target]]):
    """Pictures with one to three bright boxes."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images, self.targets = torch.randn(count, 3, 8, 8, generator=generator), list[Target]()
        for image in self.images:
            found = int(torch.randint(1, 4, (), generator=generator))
            boxes = torch.rand(found, 4, generator=generator) * 0.5 + 0.2
            labels = torch.randint(0, CLASSES, (found,), generator=generator)
            for (cx, cy, *_), label in zip(boxes.tolist(), labels.tolist(), strict=True):
                image[label, int(8 * cy), int(8 * cx)] += 3
            self.targets.append({"labels": labels, "boxes": boxes})

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        return self.images[index], self.targets[index]


def collate(batch: list[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    images, targets = zip(*batch, strict=True)
    return torch.stack(images), list(targets)


class DETR(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1)
        )
        self.transformer = nn.Transformer(width, 2, 1, 2, 2 * width, dropout=0.0, batch_first=True)
        self.query_embed = nn.Embedding(QUERIES, width)
        self.position = nn.Parameter(torch.randn(1, 4, width) * 0.1)
        self.class_embed = nn.Linear(width, CLASSES + 1)
        self.bbox_embed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.backbone(images).flatten(2).transpose(1, 2) + self.position
        queries = self.query_embed.weight.unsqueeze(0).repeat(images.shape[0], 1, 1)
        hs = self.transformer(features, queries)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


def corners(boxes: Tensor) -> Tensor:
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], dim=-1)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU of all pairs, less the share of the hull that neither covers."""
    area = [(one[:, 2:] - one[:, :2]).prod(-1) for one in (a, b)]
    inside = (torch.min(a[:, None, 2:], b[:, 2:]) - torch.max(a[:, None, :2], b[:, :2])).clamp(min=0).prod(-1)
    union = area[0][:, None] + area[1] - inside
    hull = (torch.max(a[:, None, 2:], b[:, 2:]) - torch.min(a[:, None, :2], b[:, :2])).prod(-1)
    return inside / union - (hull - union) / hull


@torch.no_grad()
def match(outputs: dict[str, Tensor], targets: list[Target]) -> list[tuple[Tensor, Tensor]]:
    """Return for each picture which query is for which box."""
    probabilities, boxes = outputs["pred_logits"].softmax(-1), outputs["pred_boxes"]
    found = []
    for probability, own, target in zip(probabilities, boxes, targets, strict=True):
        cost = 5 * torch.cdist(own, target["boxes"], p=1) - probability[:, target["labels"]]
        cost = cost - 2 * generalized_iou(corners(own), corners(target["boxes"]))
        rows, columns = linear_sum_assignment(cost.cpu().numpy())
        found.append((torch.as_tensor(rows), torch.as_tensor(columns)))
    return found


class SetCriterion(nn.Module):
    """Classification, L1 and IoU of what is matched, by the mean number of boxes of a process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty_weight", torch.ones(CLASSES + 1))

    def forward(self, outputs: dict[str, Tensor], targets: list[Target]) -> dict[str, Tensor]:
        indices = match(outputs, targets)
        world = dist.get_world_size() if dist.is_initialized() else 1
        count = torch.tensor([float(sum(len(target["labels"]) for target in targets))])
        if dist.is_initialized():
            dist.all_reduce(count)
        num_boxes = (count / world).clamp(min=1).item()
        batch = torch.cat([torch.full_like(rows, number) for number, (rows, _) in enumerate(indices)])
        queries = torch.cat([rows for rows, _ in indices])
        labels = torch.cat([target["labels"][columns] for target, (_, columns) in zip(targets, indices, strict=True)])
        boxes = torch.cat([target["boxes"][columns] for target, (_, columns) in zip(targets, indices, strict=True)])
        classes = torch.full(outputs["pred_logits"].shape[:2], CLASSES)
        classes[batch, queries] = labels
        own = outputs["pred_boxes"][batch, queries]
        iou = torch.diag(generalized_iou(corners(own), corners(boxes)))
        return {
            "ce": F.cross_entropy(outputs["pred_logits"].transpose(1, 2), classes, self.empty_weight),
            "bbox": F.l1_loss(own, boxes, reduction="none").sum() / num_boxes,
            "giou": (1 - iou).sum() / num_boxes,
        }


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__ or "", clip=0.1).parse_args(argv)
    rank, world = setup(args)
    log = Log(args, rank)
    train = loader(Boxes(32, 1), args, rank, world, collate=collate)
    test = loader(Boxes(8, 2), args, rank, world, train=False, collate=collate)
    model, criterion = DETR(), SetCriterion()
    weights = {"ce": 1.0, "bbox": 5.0, "giou": 2.0}
    backbone = [p for n, p in model.named_parameters() if n.startswith("backbone")]
    others = [p for n, p in model.named_parameters() if not n.startswith("backbone")]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": backbone, "lr": args.lr / 10}], lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    if args.plan:
        model = hetu_fx.auto_parallelize(model, (next(iter(train))[0],), optimizer=optimizer, plan=args.plan)

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        model.train()
        for images, targets in train:
            losses = criterion(model(images), targets)
            loss = sum(weights[name] * value for name, value in losses.items())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            log(loss=average(loss), norm=norm.item(), **{name: average(value) for name, value in losses.items()})
        scheduler.step()
        model.eval()
        with torch.no_grad():
            for images, targets in test:
                outputs = model(images)
                losses = criterion(outputs, targets)
                log(epoch=epoch, **{f"test_{name}": average(value) for name, value in losses.items()})
        save(args.out / "ckpt.pt", rank, model=model.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    main()
