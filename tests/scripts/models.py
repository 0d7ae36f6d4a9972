"""Models of scripts, small enough to be captured within a fraction of a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES, HIDDEN, CLASSES = 10, 24, 5


class Perceptron(nn.Module):
    """Three linear layers; its forward reads an attribute (`scale`)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.0)
        self.last = nn.Linear(HIDDEN, CLASSES)
        self.first.bias.requires_grad_(False)
        self.scale = 1.0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits, and the loss where there are labels."""
        hidden = torch.tanh(self.first(x)) * self.scale
        logits = self.last(self.dropout(torch.relu(self.middle(hidden))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def vectors(rows: int = 8) -> dict[str, Tensor]:
    """Return a batch for the perceptron."""
    return {"x": torch.randn(rows, FEATURES), "labels": torch.randint(0, CLASSES, (rows,))}
