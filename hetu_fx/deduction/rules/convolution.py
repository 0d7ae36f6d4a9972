"""Convolution, pooling and recurrence: batch and channels pass through (input channels are summed), space stays whole.

In a recurrence rows of the batch pass through, time steps and hidden channels stay whole.
"""

from __future__ import annotations

from hetu_fx.deduction.rules.build import change_dims, fresh_dims, group_factors, names, replace_dims, rules_for_ops
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Dims, Factoring, LiteralSize, Rule, factor_names
from hetu_fx.deduction.rules.size import integer


def _convolved(call: Call, *, transposed: bool = False) -> Factoring:
    """Convolve: with groups, channels are (group, channel) and the groups pass; transposed, inputs come first.

    Input channels whose number depends on the batch are whole: of none, which a replica may have, no op convolves.
    """
    shape, weight, result = call.operands[0].shape, call.operands[1].shape, call.results[0]
    at = len(shape) - len(weight) + 1  # 0 without a batch dim
    groups = integer(call.integer("groups"))
    if shape[at].over(groups) is None or result[at].over(groups) is None:
        return _convolved_whole(call, at)
    group, k, sizes = group_factors(shape[at], groups, "g", "k")
    _, o, more = group_factors(result[at], groups, "g", "o")
    kernel, image, new = fresh_dims(weight, "w")[2:], fresh_dims(shape, "x"), fresh_dims(result, "y")
    is_transposed = transposed or bool(call.arguments.get("transposed"))
    first, second = ((*group, *k), o) if is_transposed else ((*group, *o), k)
    bias = [((*group, *o),)] if len(call.operands) == 3 else []
    operands = (replace_dims(image, {at: (*group, *k)}), (first, second, *kernel), *bias)
    target: Dims = (*image[:at], (*group, *o), *new[at + 1 :])
    extra = frozenset({2} if bias else ())
    symbolic: Dims = (k,) if shape[at].number is None else ()
    return Factoring(
        operands,
        (target,),
        sizes | more,
        factor_names(((*kernel, *image[at + 1 :], *new[at + 1 :]), symbolic)),
        linear=(frozenset({0}) | extra, frozenset({1}) | extra),
        additive=extra,
        literals=(LiteralSize(call.at("groups"), group),) if group else (),
    )


def _convolved_whole(call: Call, at: int) -> Factoring:
    """Convolve a number of channels that only the run tells to be one of groups: the batch passes alone."""
    image, weight, *bias = (
        fresh_dims(operand.shape, prefix) for operand, prefix in zip(call.operands, "xwb", strict=False)
    )
    made: Dims = (*image[:at], *fresh_dims(call.results[0], "y")[at:])
    extra = frozenset({2} if bias else ())
    linear = frozenset({0}) | extra, frozenset({1}) | extra
    whole = factor_names((image[at:], made[at:], weight, *bias))
    return Factoring((image, weight, *bias), (made,), whole=whole, linear=linear, additive=extra)


def _pooled(call: Call, *, linear: bool = False) -> Factoring:
    """Pool or interpolate over space, which stays whole; batch and channels pass through."""
    space = 3 if "3d" in call.op else 1 if "1d" in call.op else 2
    return change_dims(call, range(call.rank - space, call.rank), linear)


def _sampled(call: Call) -> Factoring:
    """Read space at given places: batch and channels pass, the places too; linear in what is read."""
    image, grid = (fresh_dims(operand.shape, prefix) for operand, prefix in zip(call.operands, "xg", strict=True))
    batch = image[0]
    operands = (image, (batch, *grid[1:]))
    whole = names(image, range(2, len(image))) | names(grid, [len(grid) - 1])
    return Factoring(operands, ((*image[:2], *grid[1:-1]),), whole=whole, linear=(frozenset({0}),))


def _in_columns(call: Call, *, folds: bool) -> Factoring:
    """Write windows of space as columns, (channels, place in the window), or add these up; space stays whole.

    Relates (batch, channels, height, width) to (batch, channels x places, windows); the batch may be absent.
    """
    space, flat = call.operands[0].shape, call.results[0]
    if folds:
        space, flat = flat, space
    at = len(space) - 3
    channel, place, sizes = group_factors(flat[at], space[at], "c", "p")
    image = replace_dims(fresh_dims(space, "x"), {at: channel})
    columns = (*image[:at], (*channel, *place), *fresh_dims(flat, "y")[at + 1 :])
    whole = names(image, (at + 1, at + 2)) | names(columns, (at + 1,)) | frozenset(place)
    given, made = (columns, image) if folds else (image, columns)
    return Factoring((given,), (made,), sizes, whole, linear=(frozenset({0}),))


def _shuffle_channels(call: Call) -> Factoring:
    """Move channels into space or back: both stay whole, batch passes through."""
    return change_dims(call, range(call.rank - 3, call.rank))


def _recurred(call: Call, once: bool = False) -> Factoring:
    """Run gated cells over time, or `once`: weights, steps and hidden states are whole, rows pass."""
    at, of_states = 0 if once or call.arguments.get("batch_first") else 1, 0 if once else 1
    operands = tuple(
        _with_rows(fresh_dims(operand.shape, f"a{i}_"), {"input": at, "hx": of_states}.get(operand.argument))
        for i, operand in enumerate(call.operands)
    )
    shapes = enumerate(call.results)
    results = tuple(_with_rows(fresh_dims(shape, f"r{i}_"), of_states if i else at) for i, shape in shapes)
    every = factor_names((*operands, *results))
    draws = bool(call.arguments.get("train")) and call.arguments.get("dropout", 0.0) != 0
    return Factoring(operands, results, whole=every - {"rows"}, random=draws)


def _with_rows(dims: Dims, at: int | None) -> Dims:
    return dims if at is None or not dims[at] else replace_dims(dims, {at: ("rows",)})


POOLED_LINEARLY = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample_nearest2d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d
    upsample_bicubic2d.vec upsample_nearest1d upsample_nearest1d.vec upsample_linear1d upsample_linear1d.vec
    upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d upsample_trilinear3d.vec
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
""".split()

RULES: tuple[Rule, ...] = (
    *rules_for_ops(_convolved, "conv1d", "conv2d", "conv3d", "convolution"),
    *rules_for_ops(_convolved, "conv1d.padding", "conv2d.padding", "conv3d.padding"),
    *rules_for_ops(_convolved, "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", transposed=True),
    *rules_for_ops(_pooled, "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "max_pool2d_with_indices"),
    *rules_for_ops(_pooled, "adaptive_max_pool1d", "adaptive_max_pool3d"),
    *rules_for_ops(_sampled, "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    *rules_for_ops(_pooled, *POOLED_LINEARLY, linear=True),
    *rules_for_ops(_shuffle_channels, "pixel_shuffle", "pixel_unshuffle"),
    *rules_for_ops(_in_columns, "im2col", folds=False),
    *rules_for_ops(_in_columns, "col2im", folds=True),
    *rules_for_ops(_recurred, "gru.input", "lstm.input", "rnn_tanh.input", "rnn_relu.input"),
    *rules_for_ops(_recurred, "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", once=True),
)
