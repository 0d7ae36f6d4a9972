"""Convolution and pooling: batch and channels pass through (input channels are summed), space stays whole."""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.deduction.rules.build import built, dims_of, named, names, replaced
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.rule import NOTHING, Dim, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import Size, integer


def _convolved(call: Call) -> Factoring:
    """Convolve: with groups, channels are (group, channel) and the groups pass through."""
    return _convolution(call, transposed=bool(call.arguments.get("transposed")))


def _convolved_transposed(call: Call) -> Factoring:
    """Convolve transposed: the weight has input channels first."""
    return _convolution(call, transposed=True)


def _convolution(call: Call, *, transposed: bool) -> Factoring:
    shape, weight = call.operands[0].shape, call.operands[1].shape
    result = call.results[0]
    space = len(weight) - 2
    at = len(shape) - space - 1  # 0 without a batch dim
    groups = integer(call.integer("groups", 1))
    group = named("g", groups)
    k, inputs = _channels("k", shape[at], groups)
    o, outputs = _channels("o", result[at], groups)
    sizes: dict[str, Size] = {"g": groups, "k": inputs, "o": outputs}
    kernel = dims_of(weight, "w")[2:]
    image, new = dims_of(shape, "x"), dims_of(result, "y")
    first, second = ((*group, *k), o) if transposed else ((*group, *o), k)
    bias = ((*group, *o),)
    operands = (
        replaced(image, {at: (*group, *k)}),
        (first, second, *kernel),
        *([bias] if _has_bias(call) else []),
    )
    target: Dims = (*image[:at], (*group, *o), *new[at + 1 :])
    whole = names(kernel, range(space)) | names(image, range(at + 1, len(image)))
    whole |= names(new, range(at + 1, len(new)))
    extra = frozenset({2}) if _has_bias(call) else frozenset()
    return Factoring(
        operands,
        (target,),
        sizes,
        whole,
        linear=(frozenset({0}) | extra, frozenset({1}) | extra),
        additive=extra,
        literals=(LiteralSize(call.at("groups"), group),) if group else (),
    )


def _has_bias(call: Call) -> bool:
    return len(call.operands) == 3


def _channels(name: str, size: Size, groups: Size) -> tuple[Dim, Size]:
    inner = size.over(groups)
    assert inner is not None, "a convolution's channels are a multiple of its groups"
    return named(name, inner), inner


def _pooled(call: Call) -> Factoring:
    """Pool over space, which stays whole; batch and channels pass through."""
    space = 3 if "3d" in call.op else 1 if "1d" in call.op else 2
    return _over_space(call, space)


def _pooled_linearly(call: Call) -> Factoring:
    """Average or interpolate over space, which stays whole; batch and channels pass through."""
    return replace(_pooled(call), linear=(frozenset({0}),))


def _over_space(call: Call, space: int) -> Factoring:
    dims = dims_of(call.operands[0].shape, "x")
    at = len(dims) - space
    results = tuple((*dims[:at], *dims_of(shape, "y")[at:]) for shape in call.results)
    whole = names(dims, range(at, len(dims))).union(*(names(r, range(at, len(r))) for r in results), NOTHING)
    return Factoring((dims,), results, whole=whole)


def _sampled(call: Call) -> Factoring:
    """Read space at given places: batch and channels pass, the places too; linear in what is read."""
    image, grid = (dims_of(operand.shape, prefix) for operand, prefix in zip(call.operands, "xg", strict=True))
    batch = image[0]
    operands = (image, (batch, *grid[1:]))
    whole = names(image, range(2, len(image))) | names(grid, [len(grid) - 1])
    return Factoring(operands, ((*image[:2], *grid[1:-1]),), whole=whole, linear=(frozenset({0}),))


def unfolded(call: Call) -> Factoring:
    """Write windows of space as columns: channels become (channel, place in the window), space stays whole."""
    return _columns(call, call.operands[0].shape, call.results[0], folds=False)


def _folded(call: Call) -> Factoring:
    """Add columns up to the windows of space they are: channels are (channel, place in the window)."""
    return _columns(call, call.results[0], call.operands[0].shape, folds=True)


def _columns(call: Call, space: Shape, flat: Shape, *, folds: bool) -> Factoring:
    """Relate (batch, channels, height, width) to (batch, channels x places, windows); the batch may be absent."""
    image, columns = dims_of(space, "x"), dims_of(flat, "y")
    at = len(space) - 3
    channel, place = named("c", space[at]), flat[at].over(space[at])
    assert place is not None, "columns hold all places of a window for each channel"
    image = (*image[:at], channel, *image[at + 1 :])
    inner = named("p", place)
    target = (*image[:at], (*channel, *inner), *columns[at + 1 :])
    whole = names(image, (at + 1, at + 2)) | names(target, (at + 1,)) | frozenset(inner)
    sizes = {"c": space[at], "p": place}
    pair = (target, image) if folds else (image, target)
    return Factoring((pair[0],), (pair[1],), sizes, whole, linear=(frozenset({0}),))


def shuffled(call: Call) -> Factoring:
    """Move channels into space or back: both stay whole, batch passes through."""
    return replace(_over_space(call, 3), linear=(frozenset({0}),))


POOLED_LINEARLY = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample_nearest2d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d
    upsample_bicubic2d.vec upsample_nearest1d upsample_nearest1d.vec upsample_linear1d upsample_linear1d.vec
    upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d upsample_trilinear3d.vec
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
""".split()

RULES: tuple[Rule, ...] = (
    *built(_convolved, "conv1d", "conv2d", "conv3d", "convolution"),
    *built(_convolved, "conv1d.padding", "conv2d.padding", "conv3d.padding"),
    *built(_convolved_transposed, "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *built(_pooled, "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "max_pool2d_with_indices"),
    *built(_pooled, "adaptive_max_pool1d", "adaptive_max_pool3d"),
    *built(_sampled, "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    *built(_pooled_linearly, *POOLED_LINEARLY),
    *built(shuffled, "pixel_shuffle", "pixel_unshuffle"),
    *built(unfolded, "im2col"),
    *built(_folded, "col2im"),
)
