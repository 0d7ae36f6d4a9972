"""Losses and layers whose Python goes on by values, as libraries have them, in a model that is parallel around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, TOKENS = 6, 3, 4


class Model(nn.Module):
    """A layer, a part in the middle, a head, and a loss of (rows, classes) and labels."""

    def __init__(self, middle: nn.Module | None = None, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.middle = nn.Identity() if middle is None else middle
        self.loss = nn.CrossEntropyLoss() if loss is None else loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.loss(self.head(self.middle(torch.tanh(self.body(x)))), y)
        return made


class Dice(nn.Module):
    """Goes on by the largest label, as monai's Dice losses do: class numbers, or truths of the first class."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        if y.max() < 2:
            target = torch.stack([y == 0, y == 1, y < 0], 1).to(scores.dtype)
        else:
            target = F.one_hot(y, CLASSES).to(scores.dtype)
        shares = scores.softmax(1)
        overlap = (shares * target).sum(0)
        return (1 - (2 * overlap + 1e-5) / (shares.sum(0) + target.sum(0) + 1e-5)).mean()


class Pairs(nn.Module):
    """Has a loss of pairs, which are counted, as pytorch-metric-learning's contrastive loss."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        distances = torch.linalg.norm(scores[:, None] - scores[None] + 1e-3, dim=2)
        alike = (y[:, None] == y[None]) & ~torch.eye(len(y), dtype=torch.bool)
        near, far = alike.nonzero(as_tuple=True), (y[:, None] != y[None]).nonzero(as_tuple=True)
        made = 0 * scores.sum()
        if len(near[0]) > 0:
            made = made + distances[near].mean()
        if len(far[0]) > 0:
            losses = F.relu(2 - distances[far])
            above = losses[losses > 0]
            made = made + (above.mean() if len(above) else 0 * losses.sum())
        return made


class Triplets(nn.Module):
    """Draws together what is alike, triplet by triplet, with a mean over those that lose anything."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        alike = y[:, None] == y[None]
        chosen = (alike[:, :, None] & ~alike[:, None, :]).nonzero()
        if not len(chosen):
            return 0 * scores.sum()
        anchors, near, far = (scores[column] for column in chosen.unbind(1))
        losses = F.relu((anchors - near).square().sum(1) - (anchors - far).square().sum(1) + 1)
        count = int((losses > 0).sum())
        return losses.sum() / max(count, 1)


class Proxies(nn.Module):
    """Has a vector for each class, and a loss over the classes that a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        total = scores.new_zeros(())
        for label in y.unique().tolist():
            own = scores[y == label]
            total = total + F.cross_entropy(own @ self.proxies.t(), torch.full((len(own),), label))
        return total


class Hardest(nn.Module):
    """Finds the hardest row of each label in Python."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(scores, y, reduction="none")
        worst: dict[int, int] = {}
        for row, (label, loss) in enumerate(zip(y.tolist(), each.tolist(), strict=True)):
            if label not in worst or loss > float(each.detach()[worst[label]]):
                worst[label] = row
        return torch.stack([each[row] for row in worst.values()]).sum()


class Matching(nn.Module):
    """Assigns rows to labels greedily in numpy, as detectors match boxes, and has a loss of the pairs."""

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        costs = (1 - scores.softmax(1)[:, y]).detach().numpy().copy()
        pairs = []
        for _ in range(len(costs)):
            row, column = np.unravel_index(costs.argmin(), costs.shape)
            pairs.append((int(row), int(column)))
            costs[row, :] = costs[:, column] = np.inf
        rows, columns = map(list, zip(*pairs, strict=True))
        return F.cross_entropy(scores[rows], y[columns])


class _Saturated(torch.autograd.Function):
    """x / (1 + |x|) in numpy, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        values = x.detach().numpy()
        return torch.from_numpy(values / (1 + np.abs(values)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.from_numpy(1 / (1 + np.abs(x.detach().numpy())) ** 2)


class InNumpy(nn.Module):
    """Computes in numpy, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = _Saturated.apply(self.layer(h))
        return made


class Experts(nn.Module):
    """Sends each row to the expert that it scores highest, in a loop over experts with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        shares = self.gate(h).softmax(1)
        chosen, made = shares.argmax(1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel() == 0:
                continue
            made = made.index_add(0, rows, expert(h[rows]) * shares[rows, number, None])
        return made


class Ragged(nn.Module):
    """Cuts features at a width that values tell, and fills up again: a shape by values in between."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        width = int((h.mean(0) > -0.1).sum().clamp(1, WIDTH))
        short = h[:, :width] @ self.mix[:width, :width]
        return F.pad(short, (0, WIDTH - width)) + h


class Recurrent(nn.Module):
    """Runs a recurrent layer over features, as far as values tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, WIDTH, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        steps = int((h.mean(0) > 0).sum().clamp(2, WIDTH))
        made: Tensor = self.layer(h[:, :steps, None])[1][0]
        return made


class Sharpened(nn.Module):
    """Rounds what it is given, and passes gradients on: its backward is not the derivative of its forward."""

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = _Rounded.apply(h * 4)
        return made / 4


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "dice": Dice,
    "pairs": Pairs,
    "triplets": Triplets,
    "proxies": Proxies,
    "hardest": Hardest,
    "matching": Matching,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "numpy": InNumpy,
    "experts": Experts,
    "ragged": Ragged,
    "recurrent": Recurrent,
    "straight through": Sharpened,
}
KINDS = (*LOSSES, *LAYERS)


def made(kind: str) -> tuple[Model, nn.Module]:
    """Return a model in float64, and the part of it that no graph can be made of."""
    torch.manual_seed(0)
    part = LOSSES[kind]() if kind in LOSSES else LAYERS[kind]()
    model = Model(loss=part) if kind in LOSSES else Model(middle=part)
    return model.double(), part


def batch_of(rows: int) -> dict[str, Tensor]:
    """Return a batch in which all labels are there, if there are rows for them."""
    torch.manual_seed(1)
    return {"x": torch.randn(rows, WIDTH, dtype=torch.float64), "y": torch.arange(rows) * 2 % CLASSES}


class Codes(nn.Module):
    """Takes the nearest code, and moves those that are used, in buffers: a quantiser that learns by counting."""

    codes: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("used", torch.zeros(4, dtype=torch.int64))

    def forward(self, h: Tensor) -> Tensor:
        chosen = (h[:, None] - self.codes).square().sum(2).argmin(1)
        quantised = self.codes[chosen]
        if self.training:
            for code in chosen.unique().tolist():
                own = h[chosen == code].detach()
                self.codes[code] += 0.1 * (own.mean(0) - self.codes[code])
                self.used[code] += len(own)
        return h + (quantised - h).detach() * 0.5


class Noisy(nn.Module):
    """Adds noise to rows that it counts."""

    def forward(self, h: Tensor) -> Tensor:
        made = h.clone()
        for row in (h.sum(1) > 0).nonzero().flatten().tolist():
            made[row] = made[row] + torch.randn(WIDTH, dtype=h.dtype)
        return F.dropout(made, 0.5, self.training)
