"""Ops along dims: sums and (weighed by the count) means over them are partial, all others keep them whole."""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    broadcast_shape,
    change_dims,
    factor_dim,
    fresh_dims,
    kept_along,
    names,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import OpTraits
from hetu_fx.deduction.rules.rule import NOTHING, Dims, Factoring, Rule


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

RULES: tuple[Rule, ...] = (
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
