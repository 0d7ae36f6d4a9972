"""Image classifiers as torchvision lays them out, small: what its models do to values, not only which layers they have.

Activations are in place, as there; what a dense block joins is a list that begins with one tensor; windows are rolled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families.nets import CLASSES, Classifier

MakeLayer = Callable[[], nn.Module]


def silu() -> nn.Module:
    """Make the activation of EfficientNet."""
    return nn.SiLU(inplace=True)


def hardswish() -> nn.Module:
    """Make the activation of MobileNetV3."""
    return nn.Hardswish(inplace=True)


def relu() -> nn.Module:
    """Make the activation of most."""
    return nn.ReLU(inplace=True)


def normed(
    inputs: int, outputs: int, size: int | tuple[int, int] = 3, stride: int = 1, groups: int = 1, act: MakeLayer = relu
) -> nn.Sequential:
    """Make a convolution with batch norm and an activation in place (Conv2dNormActivation)."""
    height, width = (size, size) if isinstance(size, int) else size
    layer = nn.Conv2d(inputs, outputs, (height, width), stride, (height // 2, width // 2), groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01), act())


class SqueezeExcitation(nn.Module):
    """Weighs channels by what their averages say; the activations are of the caller's choice."""

    def __init__(self, channels: int, inner: int, act: MakeLayer, gate: MakeLayer) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.activation, self.scale_activation = act(), gate()

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        scale: Tensor = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return scale * x


class InvertedResidual(nn.Module):
    """Wide, depthwise, weighed, narrow; added to the input where shapes allow (MobileNetV3, MBConv)."""

    def __init__(self, inputs: int, wide: int, outputs: int, stride: int, act: MakeLayer, gate: MakeLayer) -> None:
        super().__init__()
        narrow = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        weigh = SqueezeExcitation(wide, max(1, wide // 4), act, gate)
        self.block = nn.Sequential(
            normed(inputs, wide, 1, act=act), normed(wide, wide, 3, stride, wide, act), weigh, narrow
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        result: Tensor = self.block(x)
        if self.is_residual:
            result += x
        return result


class DenseLayer(nn.Module):
    """Makes new channels from all that there are, which come as a list."""

    def __init__(self, inputs: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bottleneck, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(bottleneck), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        """Make the new channels."""
        bottleneck = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        made: Tensor = self.conv2(self.relu2(self.norm2(bottleneck)))
        return made


class DenseBlock(nn.Module):
    """Layers each of which sees what all before it have made."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, growth, 2 * growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Join all channels."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class InceptionA(nn.Module):
    """Four branches; long kernels are made of two."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = normed(inputs, width, 1)
        self.seven = nn.Sequential(normed(inputs, width, 1), normed(width, width, (1, 7)), normed(width, width, (7, 1)))
        self.split = normed(inputs, width, 1)
        self.wide, self.high = normed(width, width, (1, 3)), normed(width, width, (3, 1))
        self.pool = normed(inputs, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Join the branches' channels; one branch joins two of its own."""
        split = self.split(x)
        both = torch.cat([self.wide(split), self.high(split)], 1)
        pooled = self.pool(functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.one(x), self.seven(x), both, pooled], 1)


class InceptionNet(nn.Module):
    """Branches, and a second head in the middle whose loss counts less (Inception v3, GoogLeNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normed(3, 12, 3, 2)
        self.first, self.second = InceptionA(12, 6), InceptionA(30, 6)
        self.aux, self.head = nn.Linear(30, CLASSES), nn.Linear(30, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give both scores and the weighted sum of their mean cross-entropies."""
        middle = self.first(self.stem(pixel_values))
        logits = self.head(functional.adaptive_avg_pool2d(self.second(middle), (1, 1)).flatten(1))
        aux = self.aux(functional.adaptive_avg_pool2d(middle, (1, 1)).flatten(1))
        loss = functional.cross_entropy(logits, labels) + 0.4 * functional.cross_entropy(aux, labels)
        return {"loss": loss, "logits": logits}


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Let channels of all groups take turns."""
    rows, channels, height, width = x.size()
    x = x.view(rows, groups, channels // groups, height, width).transpose(1, 2).contiguous()
    return x.view(rows, channels, height, width)


class ShuffleUnit(nn.Module):
    """Halves of channels of which one is changed, or both where the image shrinks; then they are mixed."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        half = channels // 2
        inputs = half if stride == 1 else channels
        self.stride = stride
        shrinks = (self._depthwise(inputs, stride), normed(inputs, half, 1)) if stride > 1 else ()
        self.branch1 = nn.Sequential(*shrinks)
        self.branch2 = nn.Sequential(normed(inputs, half, 1), self._depthwise(half, stride), normed(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the halves."""
        if self.stride == 1:
            kept, changed = x.chunk(2, dim=1)
            return channel_shuffle(torch.cat((kept, self.branch2(changed)), dim=1), 2)
        return channel_shuffle(torch.cat((self.branch1(x), self.branch2(x)), dim=1), 2)

    def _depthwise(self, channels: int, stride: int) -> nn.Sequential:
        layer = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(channels))


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        """Bring channels last, and back."""
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    """Orders dims anew."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        """Order them."""
        return x.permute(self.dims)


class CNBlock(nn.Module):
    """ConvNeXt's block: depthwise, norm, two linear layers with channels last, a learned scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's change."""
        change: Tensor = self.layer_scale * self.block(x)
        change += x
        return change


class WindowAttention(nn.Module):
    """Attention inside windows, rolled by half a window or not, with a table of biases by distance."""

    index: Tensor

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        places = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", (apart[..., 0] * (2 * window - 1) + apart[..., 1]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside windows of an image with channels last."""
        rows, height, width, channels = x.shape
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        down, across, size = height // self.window, width // self.window, self.window**2
        x = x.view(rows, down, self.window, across, self.window, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(rows * down * across, size, channels)
        x = self._attended(x, self._hidden(x, down * across, height, width))
        x = x.view(rows, down, across, self.window, self.window, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(rows, height, width, channels)
        return torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2)) if self.shift else x

    def _attended(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        windows, size, channels = x.shape
        qkv = self.qkv(x).reshape(windows, size, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        scores = (qkv[0] * (channels // self.heads) ** -0.5).matmul(qkv[1].transpose(-2, -1))
        scores = scores + self.table[self.index].view(size, size, -1).permute(2, 0, 1).unsqueeze(0)
        if hidden is not None:
            scores = scores.view(windows // len(hidden), len(hidden), self.heads, size, size)
            scores = (scores + hidden[None, :, None]).view(-1, self.heads, size, size)
        made = scores.softmax(dim=-1).matmul(qkv[2]).transpose(1, 2).reshape(windows, size, channels)
        attended: Tensor = self.proj(made)
        return attended

    def _hidden(self, x: Tensor, windows: int, height: int, width: int) -> Tensor | None:
        """Hide from each other what the roll has brought together; None where nothing is rolled."""
        if not self.shift:
            return None
        region = x.new_zeros((height, width))
        bounds = ((0, -self.window), (-self.window, -self.shift), (-self.shift, None))
        for number, (top, bottom) in enumerate(bounds):
            for other, (left, right) in enumerate(bounds):
                region[top:bottom, left:right] = number * 3 + other
        down, across = height // self.window, width // self.window
        region = region.view(down, self.window, across, self.window).permute(0, 2, 1, 3)
        region = region.reshape(windows, self.window**2)
        return (region.unsqueeze(1) - region.unsqueeze(2)).ne(0).to(x.dtype) * -100.0


class SwinBlock(nn.Module):
    """Attention in windows and a feed-forward, each after a norm and added."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), WindowAttention(width, heads, window, shift)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add both changes."""
        x = x + self.attn(self.norm1(x))
        changed: Tensor = x + self.mlp(self.norm2(x))
        return changed


class PatchMerging(nn.Module):
    """Joins every four neighbours and halves their channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Join them."""
        corners = [x[..., i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
        merged: Tensor = self.reduction(self.norm(torch.cat(corners, -1)))
        return merged


class VisionTransformer(nn.Module):
    """Patches and a learned token through nn.TransformerEncoder-like blocks of nn.MultiheadAttention."""

    def __init__(self, width: int = 24, heads: int = 4, patch: int = 8) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embedding = nn.Parameter(torch.randn(1, (32 // patch) ** 2 + 1, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores of the learned token and the mean cross-entropy, with smoothed labels."""
        x = self.conv_proj(pixel_values).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embedding
        for number, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            y = self.norms[2 * number](x)
            x = x + attention(y, y, y, need_weights=False)[0]
            x = x + mlp(self.norms[2 * number + 1](x))
        logits = self.head(x[:, 0])
        return {"loss": functional.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class Fire(nn.Module):
    """SqueezeNet's module: few channels, then two ways of many."""

    def __init__(self, inputs: int, few: int, many: int) -> None:
        super().__init__()
        self.squeeze, self.act = nn.Conv2d(inputs, few, 1), nn.ReLU(inplace=True)
        self.one, self.three = nn.Conv2d(few, many, 1), nn.Conv2d(few, many, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Join both ways."""
        x = self.act(self.squeeze(x))
        return torch.cat([functional.relu(self.one(x), inplace=True), functional.relu(self.three(x), inplace=True)], 1)


class AtrousPyramid(nn.Module):
    """DeepLabV3's head: convolutions of several rates and the image's average side by side; scores per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(normed(3, 12, 3, 2, act=hardswish), normed(12, 12, act=hardswish))
        self.rates = nn.ModuleList(
            nn.Sequential(nn.Conv2d(12, 8, 3, padding=r, dilation=r, bias=False), nn.BatchNorm2d(8), relu())
            for r in (1, 2, 4)
        )
        self.average = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 8, 1), relu())
        self.head = nn.Conv2d(32, CLASSES, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores per pixel and class, and the mean cross-entropy of the pixels that count."""
        x = self.stem(pixel_values)
        average = functional.interpolate(self.average(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        logits = self.head(torch.cat([*(rate(x) for rate in self.rates), average], 1))
        logits = functional.interpolate(logits, size=pixel_values.shape[-2:], mode="bilinear", align_corners=False)
        return {"loss": functional.cross_entropy(logits, labels, ignore_index=255), "logits": logits}


def mobilenet_v3() -> nn.Module:
    """Hard activations in place after batch norms, weighed channels."""
    gate = nn.Hardsigmoid
    blocks = (InvertedResidual(12, 24, 12, 1, relu, gate), InvertedResidual(12, 36, 20, 2, hardswish, gate))
    return Classifier(nn.Sequential(normed(3, 12, 3, 2, act=hardswish), *blocks, normed(20, 24, 1, act=hardswish)), 24)


def efficientnet_v1() -> nn.Module:
    """Smooth activations in place, weighed channels."""
    blocks = (InvertedResidual(12, 24, 12, 1, silu, nn.Sigmoid), InvertedResidual(12, 24, 20, 2, silu, nn.Sigmoid))
    return Classifier(nn.Sequential(normed(3, 12, 3, 2, act=silu), *blocks, normed(20, 24, 1, act=silu)), 24)


def densenet121() -> nn.Module:
    """Two dense blocks with a transition between them."""
    transition = (nn.BatchNorm2d(20), nn.ReLU(inplace=True), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2, 2))
    last = (nn.BatchNorm2d(18), nn.ReLU(inplace=True))
    stem = (normed(3, 12, 7, 2), nn.MaxPool2d(3, 2, 1))
    return Classifier(nn.Sequential(*stem, DenseBlock(12, 4, 2), *transition, DenseBlock(10, 4, 2), *last), 18)


def shufflenet_v2() -> nn.Module:
    """A unit that shrinks, and one that does not."""
    body = (normed(3, 12, 3, 2), nn.MaxPool2d(3, 2, 1), ShuffleUnit(12, 2), ShuffleUnit(12, 1), normed(12, 20, 1))
    return Classifier(nn.Sequential(*body), 20)


def convnext_tiny() -> nn.Module:
    """Blocks, a norm and a convolution that shrinks between them."""
    stem, shrink = (nn.Conv2d(3, 12, 4, 4), LayerNorm2d(12)), (LayerNorm2d(12), nn.Conv2d(12, 20, 2, 2))
    return Classifier(nn.Sequential(*stem, CNBlock(12), *shrink, CNBlock(20)), 20)


def swin_t() -> nn.Module:
    """Windows in place and rolled, merged patches, windows again."""
    body = (
        *(nn.Conv2d(3, 16, 4, 4), Permute(0, 2, 3, 1), nn.LayerNorm(16)),
        *(SwinBlock(16, 4, 4, 0), SwinBlock(16, 4, 4, 2), PatchMerging(16), SwinBlock(32, 4, 4, 0)),
        *(nn.LayerNorm(32), Permute(0, 3, 1, 2)),
    )
    return Classifier(nn.Sequential(*body), 32)


def squeezenet() -> nn.Module:
    """No norm and no linear layer: the last convolution has a channel per class."""
    body = (nn.Conv2d(3, 12, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(12, 4, 8))
    return Classifier(nn.Sequential(*body, Fire(16, 4, 8)), 16)


CLASSIFIERS: Mapping[str, Callable[[], nn.Module]] = {
    "net: mobilenet_v3": mobilenet_v3,
    "net: efficientnet_v1": efficientnet_v1,
    "net: densenet121": densenet121,
    "net: inception_v3": InceptionNet,
    "net: shufflenet_v2": shufflenet_v2,
    "net: convnext_tiny": convnext_tiny,
    "net: swin_t": swin_t,
    "net: vit_b": VisionTransformer,
    "net: squeezenet": squeezenet,
}
SEGMENTERS: Mapping[str, Callable[[], nn.Module]] = {"net: deeplab_v3": AtrousPyramid}
