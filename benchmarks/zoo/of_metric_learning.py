"""pytorch-metric-learning: its losses over pairs of a batch, and those that have weights for classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn

from benchmarks.families.batches import Batch
from benchmarks.zoo.objectives import of_library

Options = dict[str, Any]

FEATURES, WIDTH, CLASSES = 12, 8, 3

OF_PAIRS: dict[str, Options] = {
    "AngularLoss": {},
    "CircleLoss": {},
    "ContrastiveLoss": {},
    "FastAPLoss": {},
    "GeneralizedLiftedStructureLoss": {},
    "HistogramLoss": {},
    "IntraPairVarianceLoss": {},
    "LiftedStructureLoss": {},
    "MarginLoss": {},
    "MultiSimilarityLoss": {},
    "NCALoss": {},
    "NPairsLoss": {},
    "NTXentLoss": {},
    "PNPLoss": {},
    "RankedListLoss": {"margin": 0.4, "Tn": 10},
    "SignalToNoiseRatioContrastiveLoss": {},
    "SupConLoss": {},
    "ThresholdConsistentMarginLoss": {},
    "TripletMarginLoss": {},
    "TupletMarginLoss": {},
}
OF_CLASSES: dict[str, Options] = {
    name: {"num_classes": CLASSES, "embedding_size": WIDTH}
    for name in (
        "ArcFaceLoss",
        "CosFaceLoss",
        "LargeMarginSoftmaxLoss",
        "NormalizedSoftmaxLoss",
        "ProxyAnchorLoss",
        "ProxyNCALoss",
        "SoftTripleLoss",
        "SphereFaceLoss",
        "SubCenterArcFaceLoss",
    )
}


class Embedded(nn.Module):
    """A net that embeds rows, and a loss over their embeddings and classes."""

    def __init__(self, name: str, options: Options) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.loss = getattr(losses, name)(**options)

    def forward(self, rows: Tensor, classes: Tensor) -> Tensor:
        """Give the loss of a batch."""
        loss: Tensor = self.loss(self.net(rows), classes)
        return loss


def _batch(rows: int, length: int) -> Batch:
    return {"rows": torch.randn(rows, FEATURES), "classes": torch.arange(rows) % CLASSES}


FAMILIES = of_library(
    "metric losses",
    {name: partial(Embedded, name, options) for name, options in (OF_PAIRS | OF_CLASSES).items()},
    None,
    _batch,
    micro_batches=1,
)
