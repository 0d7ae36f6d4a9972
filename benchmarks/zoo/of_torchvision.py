"""torchvision: classifiers, segmenters and nets for videos that call none of its own ops, fewer and narrower layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, efficientnet, resnet, segmentation, swin_transformer, video

from benchmarks.families.batches import CLASSES, Batch, MakeBatch, classes
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import cross_entropy, images_of, of_library

Make = Callable[[], nn.Module]
FRAMES, VIDEO, PLACES = 4, 32, 64  # of a video, its size, and that of images whose places are scored


def _resnet(block: type[nn.Module], **options: int) -> nn.Module:
    made: nn.Module = resnet.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **options)
    return made


def _convnext() -> nn.Module:
    settings = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    made: nn.Module = convnext.ConvNeXt(settings, num_classes=CLASSES)
    return made


def _vit() -> nn.Module:
    made: nn.Module = models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES)
    return made


def _swin(block: type[nn.Module], merging: type[nn.Module]) -> nn.Module:
    made: nn.Module = swin_transformer.SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merging
    )
    return made


def _maxvit() -> nn.Module:
    made: nn.Module = models.MaxVit((64, 64), 8, 4, [8, 8], [1, 1], 4, 0.0, num_classes=CLASSES)
    return made


def _efficientnet() -> nn.Module:
    settings = [
        efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1),
        efficientnet.FusedMBConvConfig(2, 3, 2, 8, 16, 1),
        efficientnet.MBConvConfig(4, 5, 2, 16, 16, 2),
    ]
    made: nn.Module = efficientnet.EfficientNet(settings, 0.0, num_classes=CLASSES)
    return made


CLASSIFIERS: Mapping[int, Mapping[str, Make]] = {
    32: {
        "resnet (basic)": partial(_resnet, resnet.BasicBlock),
        "resnext": partial(_resnet, resnet.Bottleneck, groups=4, width_per_group=4),
        "densenet": partial(models.DenseNet, 4, (2, 2), 8, num_classes=CLASSES),
        "mobilenet_v2": partial(models.MobileNetV2, CLASSES, 0.25),
        "mobilenet_v3_small": partial(models.mobilenet_v3_small, num_classes=CLASSES, reduced_tail=True),
        "shufflenet_v2": partial(models.ShuffleNetV2, [1, 1, 1], [8, 16, 32, 64, 64], num_classes=CLASSES),
        "mnasnet": partial(models.MNASNet, 0.25, CLASSES, 0.0),
        "efficientnet": _efficientnet,
        "regnet_x": partial(
            models.RegNet, models.regnet.BlockParams([1, 1], [16, 16], [8, 8], [1.0, 1.0], [2, 2]), CLASSES, 8
        ),
        "convnext": _convnext,
        "vit": _vit,
        "swin": partial(_swin, swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging),
        "swin_v2": partial(_swin, swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2),
    },
    64: {
        "squeezenet": partial(models.SqueezeNet, "1_1", CLASSES),
        "googlenet": partial(models.GoogLeNet, CLASSES, False, init_weights=False),
        "maxvit": _maxvit,
    },
}
SEGMENTERS: Mapping[str, Make] = {
    "lraspp": partial(segmentation.lraspp_mobilenet_v3_large, weights=None, weights_backbone=None, num_classes=CLASSES),
}
VIDEOS: Mapping[str, Make] = {
    "swin3d": partial(video.SwinTransformer3d, [2, 4, 4], 8, [2, 2], [2, 2], [2, 4, 4], num_classes=CLASSES),
}


def _videos(rows: int, length: int) -> Batch:
    return {"x": torch.randn(rows, 3, FRAMES, VIDEO, VIDEO), "target": classes(rows)}


def _scored_places(rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows, PLACES, PLACES))
    return {"input": torch.randn(rows, 3, PLACES, PLACES), "target": labels}


def _trained_on(batch: MakeBatch, nets: Mapping[str, Make]) -> list[Family]:
    return of_library("torchvision", nets, cross_entropy, batch)


FAMILIES: list[Family] = [
    *(family for size, nets in CLASSIFIERS.items() for family in _trained_on(images_of(size, "x"), nets)),
    *_trained_on(_scored_places, SEGMENTERS),
    *_trained_on(_videos, VIDEOS),
]
