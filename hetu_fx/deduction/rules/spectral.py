"""Fourier transforms: the transformed dims stay whole, all others pass through; all are linear."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import FIRST, built, dims_of, names, replaced
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Factoring, Rule


def _along_one(call: Call) -> Factoring:
    """Transform along one dim, the last by default."""
    rank = len(call.operands[0].shape)
    return _transformed(call, (call.dim("dim", rank, -1),))


def _along_last_two(call: Call) -> Factoring:
    """Transform along two dims, the last by default."""
    rank = len(call.operands[0].shape)
    given = call.arguments.get("dim")
    return _transformed(call, call.dims("dim", rank) if given else (rank - 2, rank - 1))


def _along_several(call: Call) -> Factoring:
    """Transform along several dims: the last of as many as sizes are given, all by default."""
    rank = len(call.operands[0].shape)
    sizes = call.arguments.get("s")
    last = tuple(range(rank - len(sizes), rank)) if sizes else tuple(range(rank))
    return _transformed(call, call.dims("dim", rank) if call.arguments.get("dim") else last)


def _transformed(call: Call, dims: tuple[int, ...]) -> Factoring:
    source, new = dims_of(call.operands[0].shape), dims_of(call.results[0], "o")
    target = replaced(source, {dim: new[dim] for dim in dims})
    return Factoring((source,), (target,), whole=names(source, dims) | names(new, dims), linear=FIRST)


RULES: tuple[Rule, ...] = (
    *built(_along_one, "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"),
    *built(_along_last_two, "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"),
    *built(_along_several, "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"),
    *built(_along_several, "fft_fftshift", "fft_ifftshift"),
)
