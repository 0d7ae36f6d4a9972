"""Convolutional nets in the style of torchvision, small: their blocks, each a few layers of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 13


class Classifier(nn.Module):
    """A body of convolutions, an average over space, a linear head, and the loss."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.body = body
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores per class and the mean cross-entropy."""
        logits = self.head(self.pool(self.body(pixel_values)).flatten(1))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Make a convolution with batch norm and activation."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Adds what a body computes to its input; the input is brought to the same shape."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        return functional.relu(self.body(x) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """Weighs channels by what their averages say."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        scale = self.up(functional.silu(self.down(functional.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(scale)


class Dense(nn.Module):
    """Appends new channels to its input's."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Join old and new channels."""
        return torch.cat([x, self.conv(functional.relu(self.norm(x)))], 1)


class Inception(nn.Module):
    """Four ways of different reach side by side."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(
            [
                conv(channels, width, 1),
                nn.Sequential(conv(channels, width, 1), conv(width, width, 3)),
                nn.Sequential(conv(channels, width, 1), conv(width, width, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Join the ways' channels."""
        return torch.cat([way(x) for way in self.ways], 1)


class ChannelShuffle(nn.Module):
    """Runs one half of the channels through grouped convolutions and mixes both halves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.way = nn.Sequential(conv(half, half, 1), conv(half, half, 3, groups=half), conv(half, half, 1))
        self.shuffle = nn.ChannelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the halves."""
        kept, changed = x.chunk(2, 1)
        mixed: Tensor = self.shuffle(torch.cat([kept, self.way(changed)], 1))
        return mixed


class ConvNext(nn.Module):
    """Depthwise convolution, layer norm over channels last, two linear layers, a learned scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        change: Tensor = self.scale * self.down(functional.gelu(self.up(y)))
        return x + change.permute(0, 3, 1, 2)


class UNet(nn.Module):
    """Down with pooling, up with interpolation and with transposed convolutions, group norm, scores per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, 12), self._block(12, 20)
        self.middle = self._block(20, 20)
        self.rise = nn.ConvTranspose2d(20, 20, 2, stride=2)
        self.up2, self.up1 = self._block(40, 12), self._block(24, 12)
        self.head = nn.Conv2d(12, CLASSES, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores per pixel and class, and the mean cross-entropy of the pixels that count."""
        first = self.down1(pixel_values)
        second = self.down2(functional.max_pool2d(first, 2))
        low = self.middle(functional.max_pool2d(second, 2))
        up = self.up2(torch.cat([self.rise(low), second], 1))
        up = functional.interpolate(up, size=first.shape[-2:], mode="bilinear", align_corners=False)
        logits = self.head(self.up1(torch.cat([up, first], 1)))
        return {"loss": functional.cross_entropy(logits, labels, ignore_index=255), "logits": logits}

    def _block(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


def vgg() -> nn.Module:
    """Convolutions and pooling, then a large linear layer."""
    body = nn.Sequential(
        conv(3, 12), nn.MaxPool2d(2), conv(12, 20), nn.MaxPool2d(2), nn.Flatten(1), nn.Unflatten(1, (20 * 64, 1, 1))
    )
    return Classifier(body, 20 * 64)


def alexnet() -> nn.Module:
    """Large strides, no norm, local response through pooling."""
    body = nn.Sequential(
        nn.Conv2d(3, 12, 7, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(12, 20, 3, padding=1), nn.ReLU()
    )
    return Classifier(body, 20)


def resnet() -> nn.Module:
    """Two basic blocks and a bottleneck."""
    basic = Residual(nn.Sequential(conv(12, 12), nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)))
    neck = nn.Sequential(conv(12, 8, 1), conv(8, 8, 3, 2), nn.Conv2d(8, 20, 1), nn.BatchNorm2d(20))
    return Classifier(
        nn.Sequential(conv(3, 12, 7, 2), nn.MaxPool2d(3, 2, 1), basic, Residual(neck, nn.Conv2d(12, 20, 1, 2))), 20
    )


def resnext() -> nn.Module:
    """A bottleneck with grouped convolutions."""
    neck = nn.Sequential(conv(12, 16, 1), conv(16, 16, 3, groups=4), nn.Conv2d(16, 12, 1), nn.BatchNorm2d(12))
    return Classifier(nn.Sequential(conv(3, 12, 3, 2), Residual(neck)), 12)


def mobilenet() -> nn.Module:
    """An inverted bottleneck: depthwise convolution in many channels, hard activations."""
    wide = nn.Sequential(nn.Conv2d(12, 36, 1, bias=False), nn.BatchNorm2d(36), nn.ReLU6())
    depthwise = nn.Sequential(nn.Conv2d(36, 36, 3, 1, 1, groups=36, bias=False), nn.BatchNorm2d(36), nn.Hardswish())
    narrow = nn.Sequential(nn.Conv2d(36, 12, 1, bias=False), nn.BatchNorm2d(12))
    return Classifier(nn.Sequential(conv(3, 12, 3, 2), Residual(nn.Sequential(wide, depthwise, narrow))), 12)


def efficientnet() -> nn.Module:
    """An inverted bottleneck with weighed channels."""
    parts = (
        conv(12, 36, 1),
        conv(36, 36, 3, groups=36),
        SqueezeExcite(36, 4),
        nn.Conv2d(36, 12, 1),
        nn.BatchNorm2d(12),
    )
    return Classifier(nn.Sequential(conv(3, 12, 3, 2), Residual(nn.Sequential(*parts))), 12)


def densenet() -> nn.Module:
    """Blocks that append channels."""
    return Classifier(
        nn.Sequential(conv(3, 12, 3, 2), Dense(12, 8), Dense(20, 8), nn.AvgPool2d(2), conv(28, 20, 1)), 20
    )


def inception() -> nn.Module:
    """Ways of different reach."""
    return Classifier(nn.Sequential(conv(3, 12, 3, 2), Inception(12, 6), nn.MaxPool2d(2), Inception(24, 6)), 24)


def shufflenet() -> nn.Module:
    """Halves of channels that are mixed."""
    return Classifier(nn.Sequential(conv(3, 24, 3, 2), ChannelShuffle(24), ChannelShuffle(24)), 24)


def convnext_net() -> nn.Module:
    """Blocks with large depthwise kernels."""
    return Classifier(nn.Sequential(nn.Conv2d(3, 12, 4, 4), ConvNext(12), ConvNext(12)), 12)


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "net: vgg": vgg,
    "net: alexnet": alexnet,
    "net: resnet": resnet,
    "net: resnext": resnext,
    "net: mobilenet": mobilenet,
    "net: efficientnet": efficientnet,
    "net: densenet": densenet,
    "net: inception": inception,
    "net: shufflenet": shufflenet,
    "net: convnext": convnext_net,
}
NETS_OF_PIXELS: Mapping[str, Callable[[], nn.Module]] = {"net: unet": UNet}
