"""segmentation_models_pytorch: each decoder over a small encoder, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import segmentation_models_pytorch as models
import torch
from segmentation_models_pytorch import losses
from torch import nn

from benchmarks.families.batches import Batch
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import cross_entropy, of_library, scored

Options = dict[str, Any]

PLACES = 3
SMALL: Options = {"encoder_name": "timm-mobilenetv3_small_minimal_100", "encoder_weights": None, "classes": PLACES}
DECODERS: Mapping[int, Mapping[str, Options]] = {
    32: {
        "Unet": {"encoder_depth": 3, "decoder_channels": (16, 8, 8)},
        "UnetPlusPlus": {"encoder_depth": 3, "decoder_channels": (16, 8, 8)},
        "MAnet": {"encoder_depth": 3, "decoder_channels": (16, 8, 8)},
        "Linknet": {"encoder_depth": 3},
    },
    128: {"PAN": {"decoder_channels": 8}},
    64: {
        "FPN": {"decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32},
        "PSPNet": {"psp_out_channels": 16},
        "DeepLabV3": {"decoder_channels": 8},
        "DeepLabV3Plus": {"decoder_channels": 8},
        "UPerNet": {"decoder_channels": 8},
        "Segformer": {"decoder_segmentation_channels": 8},
    },
}
LOSSES: Mapping[str, Options] = {
    "JaccardLoss": {"mode": "multiclass"},
    "DiceLoss": {"mode": "multiclass"},
    "TverskyLoss": {"mode": "multiclass"},
    "FocalLoss": {"mode": "multiclass"},
    "LovaszLoss": {"mode": "multiclass"},
    "SoftCrossEntropyLoss": {"smooth_factor": 0.1},
}

IN_FLOAT32 = "LovaszLoss"
"""Takes a dot product of what it has cast to float32, which nothing keeps from a leaf, and of what it was given."""


def _net(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(models, name)(**SMALL, **options)
    return made


def _places(size: int, name: str, rows: int, length: int) -> Batch:
    return {name: torch.randn(rows, 3, size, size), "target": torch.randint(0, PLACES, (rows, size, size))}


def _loss(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(losses, name)(**options)
    return made


FAMILIES: list[Family] = [
    *(
        family
        for size, nets in DECODERS.items()
        for family in of_library(
            "segmentation_models",
            {name: partial(_net, name, options) for name, options in nets.items()},
            cross_entropy,
            partial(_places, size, "x"),
        )
    ),
    *(
        replace(family, dtype=torch.float32) if family.name.endswith(IN_FLOAT32) else family
        for family in of_library(
            "segmentation_models",
            {name: partial(scored, partial(_loss, name, options), 3, PLACES) for name, options in LOSSES.items()},
            None,
            partial(_places, 16, "input"),
            micro_batches=1,
        )
    ),
]
