"""Ops along dims: sums and (weighed by the count) means over them are partial, all others keep them whole."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import FIRST, broadcast, built, changed, dims_of, kept_along, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import NOTHING, Factoring, Rule


def reduced(call: Call, *, linear: bool = False, averaged: bool = False, whole: bool = False) -> Factoring:
    """Reduce over dims, which are gone: in parts where they are cut (averages weighed by the count), or whole."""
    dims, gone = dims_of(call.operands[0].shape), call.dims()
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
    target = dims_of(call.results[0])
    dim = call.dim(rank=len(target) + 1)
    full = (*target[:dim], ("d",), *target[dim:])
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    return Factoring(operands, (target,), whole=names(full, [dim]))


def _transformed(call: Call) -> Factoring:
    """Transform along dims, which stay whole: without any given, the last of as many as sizes are, all by default."""
    sizes = call.arguments.get("s") or ()
    is_last = bool(sizes) and not call.arguments.get("dim")
    return changed(call, range(call.rank - len(sizes), call.rank) if is_last else call.dims())


LOOKED_OVER = """
    amax amin aminmax max min max.dim min.dim argmax argmin median median.dim prod prod.dim_int any any.dim any.dims
    all all.dim all.dims logsumexp std std.dim std.correction var var.dim var.correction var_mean.correction
    std_mean.correction std_mean.dim var_mean.dim norm.Scalar norm.ScalarOpt_dim linalg_vector_norm mode
""".split()

FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift
""".split()

RULES: tuple[Rule, ...] = (
    *built(reduced, "sum", "sum.dim_IntList", "nansum", linear=True),
    *built(reduced, "count_nonzero", "count_nonzero.dim_IntList"),
    *built(reduced, "mean", "mean.dim", linear=True, averaged=True),
    *built(reduced, *LOOKED_OVER, whole=True),
    *built(_compared_along, "cosine_similarity"),
    *built(kept_along, "cumprod", "logcumsumexp", "cummax", "cummin"),
    *built(kept_along, "cumsum", linear=True),
    *built(_transformed, *FOURIER),
)
