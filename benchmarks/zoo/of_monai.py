"""MONAI: nets for images of bodies in two dims, and its losses over classes of places, over images, and over pairs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from monai import losses
from monai.networks import nets
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families.batches import CLASSES, Batch, MakeBatch, classes
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import Loss, cross_entropy, first, of_library, scored

Options = dict[str, Any]

SIZE, PLACES = 32, 3  # of images; classes of places
FLAT: Options = {"spatial_dims": 2, "in_channels": 1, "out_channels": PLACES}
STEPS: Options = {"channels": (8, 16, 32), "strides": (2, 2)}

SEGMENTERS: Mapping[str, Options] = {
    "UNet": FLAT | STEPS | {"num_res_units": 1},
    "BasicUNet": FLAT | {"features": (8, 8, 16, 16, 16, 8)},
    "BasicUNetPlusPlus": FLAT | {"features": (8, 8, 16, 16, 16, 8)},
    "AttentionUnet": FLAT | STEPS,
    "DynUNet": FLAT
    | {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (8, 16, 16)},
    "SegResNet": FLAT | {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    "SegResNetDS": FLAT | {"init_filters": 8, "blocks_down": (1, 1)},
    "HighResNet": FLAT
    | {
        "layer_params": (
            {"name": "conv_0", "n_features": 8, "kernel_size": 3},
            {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 8, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        )
    },
    "AutoEncoder": FLAT | {"channels": (8, 16), "strides": (2, 2)},
    "MedNeXt": {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": PLACES,
        "init_filters": 4,
        "blocks_down": (1, 1, 1, 1),
        "blocks_up": (1, 1, 1, 1),
        "blocks_bottleneck": 1,
    },
}
WINDOWED: Mapping[str, Options] = {
    "UNETR": FLAT
    | {"img_size": 2 * SIZE, "feature_size": 4, "hidden_size": 16, "mlp_dim": 32, "num_heads": 2, "proj_type": "conv"},
    "SwinUNETR": FLAT | {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
}
CLASSIFIERS: Mapping[str, Options] = {
    "DenseNet": FLAT | {"out_channels": CLASSES, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
    "ResNet": {
        "block": "basic",
        "layers": (1, 1, 1, 1),
        "block_inplanes": (8, 8, 16, 16),
        "spatial_dims": 2,
        "n_input_channels": 1,
        "num_classes": CLASSES,
    },
    "ViT": {
        "in_channels": 1,
        "img_size": (SIZE, SIZE),
        "patch_size": (8, 8),
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "spatial_dims": 2,
        "classification": True,
        "num_classes": CLASSES,
        "post_activation": None,
    },
}


def _net(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(nets, name)(**options)
    return made


ONE_HOT: Options = {"to_onehot_y": True, "softmax": True}
OF_CLASSES: Mapping[str, Options] = {
    "DiceLoss": ONE_HOT,
    "DiceLoss (batch)": ONE_HOT | {"batch": True},
    "DiceLoss (no background)": ONE_HOT | {"include_background": False},
    "DiceCELoss": ONE_HOT,
    "DiceFocalLoss": ONE_HOT,
    "GeneralizedDiceLoss": ONE_HOT,
    "GeneralizedDiceFocalLoss": ONE_HOT,
    "TverskyLoss": ONE_HOT,
    "FocalLoss": {"to_onehot_y": True},
    "HausdorffDTLoss": ONE_HOT,
}
OF_ONE_HOT: Mapping[str, Options] = {
    "DiceLoss (sigmoid)": {"sigmoid": True},
    "AsymmetricUnifiedFocalLoss": {"num_classes": PLACES},
    "SoftDiceclDiceLoss": {},
    "SoftclDiceLoss": {},
}
OF_IMAGES: Mapping[str, Options] = {
    "SSIMLoss": {"spatial_dims": 2, "win_size": 5},
    "LocalNormalizedCrossCorrelationLoss": {"spatial_dims": 2, "kernel_size": 3},
    "JukeboxLoss": {"spatial_dims": 2},
}


def _loss(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(losses, name.partition(" ")[0])(**options)
    return made


def _places(rows: int, length: int, name: str = "x", size: int = SIZE) -> Batch:
    return {name: torch.randn(rows, 1, size, size), "target": torch.randint(0, PLACES, (rows, size, size))}


def _places_in_channels(rows: int, length: int) -> Batch:
    labels = torch.randint(0, PLACES, (rows, 1, SIZE, SIZE))
    return {"input": torch.randn(rows, 1, SIZE, SIZE), "target": labels.to(torch.float)}


def _one_hot_places(rows: int, length: int) -> Batch:
    labels = torch.randint(0, PLACES, (rows, SIZE, SIZE))
    hot = functional.one_hot(labels, PLACES).movedim(-1, 1)
    return {"input": torch.randn(rows, 1, SIZE, SIZE), "target": hot.to(torch.float)}


def _images(rows: int, length: int) -> Batch:
    return {"input": torch.rand(rows, 1, SIZE, SIZE), "target": torch.rand(rows, 1, SIZE, SIZE)}


def _classed(rows: int, length: int) -> Batch:
    return {"x": torch.randn(rows, 1, SIZE, SIZE), "target": classes(rows)}


def _scores(output: Any, target: Tensor) -> Tensor:
    """Score places; nets that return scores of several depths give them in a list, or as channels of another dim."""
    scores = first(output)
    return cross_entropy(scores if scores.dim() == 4 else scores[:, 0], target)


def _trained_on(batch: MakeBatch, loss: Loss, found: Mapping[str, Options]) -> list[Family]:
    return of_library("monai", {name: partial(_net, name, options) for name, options in found.items()}, loss, batch)


def _over(batch: MakeBatch, channels: int, found: Mapping[str, Options]) -> list[Family]:
    made = {name: partial(scored, partial(_loss, name, options), 1, channels) for name, options in found.items()}
    return of_library("monai", made, None, batch, micro_batches=1)


FAMILIES = [
    *_trained_on(_places, _scores, SEGMENTERS),
    *_trained_on(partial(_places, name="x_in", size=2 * SIZE), _scores, WINDOWED),
    *_trained_on(_classed, cross_entropy, CLASSIFIERS),
    *_over(_places_in_channels, PLACES, OF_CLASSES),
    *_over(_one_hot_places, PLACES, OF_ONE_HOT),
    *_over(_images, 1, OF_IMAGES),
]
