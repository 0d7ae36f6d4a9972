"""Ops along dims: sums and (weighed by the count) means over them are partial, all others keep them whole.

Normalizations and losses: what they normalize over stays whole or has a form for parts of it, all else passes. Losses
sum rows away (a mean is partial, weighed by the shard's count).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    broadcast_shape,
    change_dims,
    factor_dim,
    fresh_dims,
    group_factors,
    keep_dims,
    kept_along,
    names,
    opaque,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import OnMissingFactor, OpTraits, PartCall, ShardedForm, known_size
from hetu_fx.deduction.rules.rule import NOTHING, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import integer
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand
from hetu_fx.graph.meta import HALVES


def reduce_dims(call: Call, *, linear: bool = False, averaged: bool = False, whole: bool = False) -> Factoring:
    """Reduce over dims, which are gone: in parts where they are cut (averages weighed by the count), or whole."""
    dims, gone = fresh_dims(call.operands[0].shape), call.dims()
    target = tuple(dim for i, dim in enumerate(dims) if i not in gone)
    if call.arguments.get("keepdim"):
        target = tuple(() if i in gone else dim for i, dim in enumerate(dims))
    over = names(dims, gone)
    return Factoring(
        (dims,),
        (target,) * len(call.results),
        whole=over if whole else NOTHING,
        linear=FIRST if linear else (),
        averaged=over if averaged else NOTHING,
    )


def _compared_along(call: Call) -> Factoring:
    """Compare directions along a dim, which stays whole and is gone; operands are broadcast."""
    target = fresh_dims(call.results[0])
    dim = call.dim(rank=len(target) + 1)
    full = (*target[:dim], ("d",), *target[dim:])
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    return Factoring(operands, (target,), whole=names(full, [dim]))


def _transformed(call: Call) -> Factoring:
    """Transform along dims, which stay whole: without any given, the last of as many as sizes are, all by default."""
    sizes = call.arguments.get("s") or ()
    is_last = bool(sizes) and not call.arguments.get("dim")
    return change_dims(call, range(call.rank - len(sizes), call.rank) if is_last else call.dims())


def _quantiles(call: Call) -> Factoring:
    """Take quantiles over dims, which stay whole; several make a first dim, which stays whole too."""
    factoring = reduce_dims(call, whole=True)
    asked = call.shape("q") or ()
    several = factor_dim("q", asked[0]) if asked else ()
    lead = (several,) if asked else ()
    operands = (*factoring.operands, lead) if call.position("q") is not None else factoring.operands
    results = tuple((*lead, *dims) for dims in factoring.results)
    return replace(factoring, operands=operands, results=results, whole=factoring.whole.union(several))


def _distant(call: Call) -> Factoring:
    """Measure how far vectors are apart along the last dim, which stays whole."""
    full = fresh_dims(broadcast_shape([operand.shape for operand in call.operands]))
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    last: Dims = ((),) if call.arguments.get("keepdim") else ()
    return Factoring(operands, ((*full[:-1], *last),), whole=names(full[-1:]))


def _in_frames(call: Call) -> Factoring:
    """Transform a signal frame by frame, or back: signal and frames stay whole, the batch passes; linear in them."""
    signal, result = call.operands[0].shape, call.results[0]
    count = len(signal) - 1 if len(signal) < len(result) else len(result) - 1  # dims of the batch
    source = fresh_dims(signal)
    made = (*source[:count], *fresh_dims(result, "o")[count:])
    others = tuple(fresh_dims(operand.shape, "w") for operand in call.operands[1:])
    whole = names(source[count:]).union(names(made[count:]), *(names(dims) for dims in others))
    return Factoring((source, *others), (made,), whole=whole, linear=FIRST)


def _integrated(call: Call, *, keeps: bool = False) -> Factoring:
    """Integrate along a dim by its neighbours: the dim stays whole, and is gone or one shorter."""
    return change_dims(call, [call.dim()]) if keeps else reduce_dims(call, linear=True, whole=True)


LOOKED_OVER = """
    amax amin aminmax max min max.dim min.dim argmax argmin median median.dim prod prod.dim_int any any.dim any.dims
    all all.dim all.dims logsumexp std std.dim std.correction var var.dim var.correction var_mean.correction
    std_mean.correction std_mean.dim var_mean.dim norm.Scalar norm.ScalarOpt_dim linalg_vector_norm mode
    var_mean std_mean nanmean nanmedian nanmedian.dim kthvalue
""".split()

FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift
""".split()

REDUCTIONS: tuple[Rule, ...] = (
    *rules_for_ops(reduce_dims, "sum", "sum.dim_IntList", "nansum", linear=True),
    *rules_for_ops(reduce_dims, "count_nonzero", "count_nonzero.dim_IntList"),
    *rules_for_ops(reduce_dims, "mean", "mean.dim", linear=True, averaged=True),
    *rules_for_ops(reduce_dims, *LOOKED_OVER, whole=True),
    *rules_for_ops(_compared_along, "cosine_similarity"),
    *rules_for_ops(kept_along, "cumprod", "logcumsumexp", "cummax", "cummin"),
    *rules_for_ops(kept_along, "cumsum", linear=True),
    *rules_for_ops(_transformed, *FOURIER, traits=OpTraits(needs_entries=True)),
    *rules_for_ops(_quantiles, "quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar"),
    *rules_for_ops(_distant, "pairwise_distance"),
    *rules_for_ops(_in_frames, "stft", "stft.center", "istft"),
    *rules_for_ops(_integrated, "trapezoid.dx", "trapz.dx"),
    *rules_for_ops(_integrated, "cumulative_trapezoid.dx", keeps=True),
)


NONE, MEAN = 0, 1  # torch's codes of the reduction argument; 2 is the sum
aten = torch.ops.aten


def softmax(call: Call) -> Factoring:
    """Normalize over one dim, which may be cut where the op has a form for that."""
    factoring = keep_dims(call)
    return replace(factoring, sharded=names(factoring.operands[0], [call.dim()]))


def _softmax_gradient(call: Call) -> Factoring:
    """Take the gradient of a softmax, of which one dim stays whole."""
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims, dims), (dims,), whole=names(dims, [call.dim()]))


def _over_last_dims(call: Call) -> Factoring:
    """Normalize over the last dims, which stay whole and which weight and bias have (layer and RMS norm)."""
    dims = fresh_dims(call.operands[0].shape)
    count = len(call.arguments["normalized_shape"])
    last = range(len(dims) - count, len(dims))
    operands = (dims, *(dims[len(dims) - count :] for _ in call.operands[1:]))
    statistics = tuple(() if i in last else dim for i, dim in enumerate(dims))
    results = tuple(dims if shape == call.operands[0].shape else statistics for shape in call.results)
    return Factoring(operands, results, whole=names(dims, last))


def _gradient_over_last_dims(call: Call) -> Factoring:
    """Take the gradient of a layer norm, of which the last dims stay whole; with those of weight and bias all dims."""
    dims = fresh_dims(call.operands[0].shape)
    if len(call.results) > 1:
        return opaque(call)
    count = len(call.arguments["normalized_shape"])
    last = range(len(dims) - count, len(dims))
    statistics = tuple(() if i in last else dim for i, dim in enumerate(dims))
    operands = (dims, dims, statistics, statistics, *(dims[len(dims) - count :] for _ in call.operands[4:]))
    return Factoring(operands, (dims,), whole=names(dims, last), linear=FIRST)


def _over_groups(call: Call) -> Factoring:
    """Normalize over groups of channels and space: batch and groups pass through, the rest stays whole."""
    shape, groups = call.operands[0].shape, integer(call.integer("num_groups"))
    if shape[1].over(groups) is None:  # only the run tells how many channels a group has
        groups = integer(1)
    group, rest, sizes = group_factors(shape[1], groups, "group", "channel")
    dims = replace_dims(fresh_dims(shape), {1: (*group, *rest)})
    operands = (dims, *(((*group, *rest),) for _ in call.operands[1:]))
    found = (LiteralSize(call.at("num_groups"), group),) if group else ()
    return Factoring(operands, (dims,), sizes, names(dims[2:]).union(rest), literals=found)


def _over_all_but_one(call: Call) -> Factoring:
    """Scale a weight to a length for each entry of one dim (weight norm); that dim passes, all others stay whole."""
    dims = fresh_dims(call.operands[0].shape)
    dim = call.dim()
    length = tuple(factors if i == dim else () for i, factors in enumerate(dims))
    return Factoring((dims, length), (dims,), whole=names(dims, [i for i in range(len(dims)) if i != dim]))


def _per_channel(call: Call, *, instances: bool = False) -> Factoring:
    """Normalize over batch and space (batch norm), or over space for each instance: channels pass.

    With running statistics a batch norm passes everything, an instance norm looks over the batch, too.
    """
    dims = fresh_dims(call.operands[0].shape)
    channel: Dims = (dims[1],)
    operands = (dims, *(channel for _ in call.operands[1:]))
    results = tuple(_channel_or_all(len(shape), dims, channel) for shape in call.results)
    trains = bool(call.arguments.get("training", call.arguments.get("train", True)))
    over_rows = call.position("running_mean") is not None if instances else trains
    rows = names(dims[:1]) if over_rows else NOTHING
    space = names(dims[2:]) if over_rows or instances else NOTHING
    return Factoring(operands, results, whole=rows | space)


def _channel_or_all(rank: int, dims: Dims, channel: Dims) -> Dims:
    return channel if rank == 1 else dims if rank == len(dims) else ()


def _log_softmax_over_parts(shard: PartCall) -> fx.Node:
    """Subtract log sum exp over all parts."""
    return _cast_back(shard, _normalized(shard))


def _softmax_over_parts(shard: PartCall) -> fx.Node:
    """Divide by the sum over all parts."""
    return _cast_back(shard, shard.emit(aten.exp.default, _normalized(shard)))


def _normalized(shard: PartCall) -> fx.Node:
    scores, asked = shard.in_full(), shard.given["dtype"]
    scores = scores if asked is None else shard.emit(aten.to.dtype, scores, asked)
    return shard.emit(aten.sub.Tensor, scores, shard.log_sum_exp(scores, shard.dim, summed=True))


def _cast_back(shard: PartCall, result: fx.Node) -> fx.Node:
    dtype = meta.dtype(operand(shard.node))
    narrow = shard.given["dtype"] is None and dtype in HALVES
    return shard.emit(aten.to.dtype, result, dtype) if narrow else result


def _classified(call: Call) -> Factoring:
    """Compare scores per class with targets: all dims but the classes are rows.

    The class dim may be cut, if targets are indices (not probabilities) and classes are not weighed.
    """
    shape = call.operands[0].shape
    dims = fresh_dims(shape)
    at = 1 if len(shape) > 1 else 0
    rows = dims[:at] + dims[at + 1 :]
    operands = tuple(_of_rank(len(op.shape), op.argument, dims, rows, dims[at]) for op in call.operands)
    cut = call.position("weight") is None and operands[1] == rows
    classes = names(dims, [at])
    return _reduced(call, operands, rows, NOTHING if cut else classes, classes if cut else NOTHING)


def _points_at_classes(call: Call) -> list[tuple[int, int, int]]:
    return [] if call.operands[1].is_float else [(1, 0, 1 if call.rank > 1 else 0)]


def _of_rank(rank: int, argument: str, dims: Dims, rows: Dims, classes: tuple[str, ...]) -> Dims:
    if argument == "weight":
        return (classes,)
    return dims if rank == len(dims) else rows


def _elementwise_loss(call: Call) -> Factoring:
    """Compare each element with its target: every dim is rows."""
    rows = fresh_dims(broadcast_shape([operand.shape for operand in call.operands]))
    return _reduced(call, tuple(broadcast(operand.shape, rows) for operand in call.operands), rows, NOTHING, NOTHING)


def _gradient_of_compared(call: Call) -> Factoring:
    """Take the gradient of a loss of elements; that of a mean goes by how many there are, which stay whole."""
    dims = fresh_dims(call.results[0])
    operands = tuple(broadcast(operand.shape, dims) for operand in call.operands)
    whole = names(dims) if call.integer("reduction") == MEAN else NOTHING
    return Factoring(operands, (dims,), whole=whole, linear=FIRST)


def _compared_vectors(call: Call) -> Factoring:
    """Compare vectors by how far they are apart, or what way they point: their last dim stays whole, all else is rows.

    Labels of pairs have no last dim.
    """
    full = fresh_dims(broadcast_shape([operand.shape for operand in call.operands if operand.argument != "target"]))
    rows = full[:-1]
    operands = tuple(broadcast(op.shape, rows if op.argument == "target" else full) for op in call.operands)
    return _reduced(call, operands, rows, names(full[-1:]), NOTHING)


def _set_apart(call: Call) -> Factoring:
    """Hold scores of classes, which stay whole, against each other, row by row."""
    scores = call.operands[0].shape
    dims = fresh_dims(scores)
    rows, classes = dims[:-1], dims[-1:]
    others = {"weight": classes, "target": dims if call.shape("target") == scores else rows}
    operands = tuple(broadcast(operand.shape, others.get(operand.argument, dims)) for operand in call.operands)
    return _reduced(call, operands, rows, names(classes), NOTHING)


def _reduced(
    call: Call, operands: tuple[Dims, ...], rows: Dims, whole: frozenset[str], sharded: frozenset[str]
) -> Factoring:
    reduction = call.integer("reduction")
    results: tuple[Dims, ...] = (rows if reduction == NONE else (),) + ((),) * (len(call.results) - 1)
    averaged = names(rows) if reduction == MEAN else NOTHING
    return Factoring(operands, results, whole=whole, averaged=averaged, sharded=sharded)


def _cross_entropy_over_parts(shard: PartCall) -> fx.Node:
    """Compare scores with targets, labels smoothed or not; the same on every device."""
    given, dim = shard.given, _class_dim(shard)
    scores, smoothing = shard.in_full(), given["label_smoothing"]
    normalizer = shard.log_sum_exp(scores, dim, summed=False)
    expected = shard.pick_rows(scores, dim, shard.emit(aten.unsqueeze.default, given["target"], dim))
    if smoothing:
        spread = shard.emit(aten.sum.dim_IntList, scores, [dim], True)
        expected = shard.emit(aten.mul.Tensor, expected, 1 - smoothing)
        expected = shard.emit(aten.add.Tensor, expected, spread, alpha=smoothing / sum(map(known_size, shard.sizes)))
    each = shard.emit(aten.sub.Tensor, normalizer, shard.total(expected))
    return _over_rows(shard, shard.emit(aten.squeeze.dim, each, dim))


def _pick_own_scores(shard: PartCall) -> fx.Node:
    """Pick the negative scores of targets that lie in the part; a summand."""
    dim = _class_dim(shard)
    index = shard.emit(aten.unsqueeze.default, shard.given["target"], dim)
    own = shard.pick_rows(shard.in_full(), dim, index)
    return _over_rows(shard, shard.emit(aten.neg.default, shard.emit(aten.squeeze.dim, own, dim)))


def _class_dim(shard: PartCall) -> int:
    return 1 if shard.rank > 1 else 0


def _over_rows(shard: PartCall, each: fx.Node) -> fx.Node:
    """Leave ignored targets out, and sum or average what is left."""
    given, dtype = shard.given, meta.dtype(operand(shard.node))
    ignored = shard.emit(aten.eq.Scalar, given["target"], given["ignore_index"])
    loss = shard.emit(aten.masked_fill.Scalar, each, ignored, 0.0)
    if given["reduction"] != NONE:
        loss = shard.emit(aten.sum.default, loss)
    if given["reduction"] == MEAN:
        count = shard.emit(aten.sum.default, shard.emit(aten.logical_not.default, ignored))
        loss = shard.emit(aten.div.Tensor, loss, count)
    return shard.emit(aten.to.dtype, loss, dtype) if dtype in HALVES else loss


BATCH_NORMS = """
    batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _batch_norm_with_update_functional
""".split()

NORMALIZATIONS: tuple[Rule, ...] = (
    *rules_for_ops(softmax, "softmax.int", traits=OpTraits(sharded=ShardedForm(_softmax_over_parts))),
    *rules_for_ops(softmax, "log_softmax.int", traits=OpTraits(sharded=ShardedForm(_log_softmax_over_parts))),
    *rules_for_ops(softmax, "_softmax", "_log_softmax", "_safe_softmax"),
    *rules_for_ops(_softmax_gradient, "_softmax_backward_data", "_log_softmax_backward_data"),
    *rules_for_ops(_over_last_dims, "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"),
    *rules_for_ops(_gradient_over_last_dims, "native_layer_norm_backward"),
    *rules_for_ops(_over_groups, "group_norm"),
    *rules_for_ops(_over_all_but_one, "_weight_norm"),
    *rules_for_ops(_per_channel, *BATCH_NORMS),
    *rules_for_ops(_per_channel, "instance_norm", instances=True),
    *rules_for_ops(
        _classified,
        "cross_entropy_loss",
        traits=OpTraits(sharded=ShardedForm(_cross_entropy_over_parts), points=_points_at_classes),
    ),
    *rules_for_ops(
        _classified,
        "nll_loss",
        "nll_loss_nd",
        traits=OpTraits(sharded=ShardedForm(_pick_own_scores, OnMissingFactor.SUM)),
    ),
    *rules_for_ops(_classified, "nll_loss2d"),
    *rules_for_ops(
        _elementwise_loss,
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
        *("margin_ranking_loss", "hinge_embedding_loss"),
    ),
    *rules_for_ops(
        _gradient_of_compared,
        *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward"),
    ),
    *rules_for_ops(_compared_vectors, "triplet_margin_loss", "cosine_embedding_loss"),
    *rules_for_ops(_set_apart, "multi_margin_loss", "multilabel_margin_loss"),
)

RULES: tuple[Rule, ...] = (*REDUCTIONS, *NORMALIZATIONS)
