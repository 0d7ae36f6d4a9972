"""Regions of tensors whose sizes are not known: bounds that grow in step with the size of a dim.

A dim of symbolic size n that is split must be a multiple of the annotation's granule g (Hetu v2 appendix A.2: S / 2
requires S mod 2 == 0). Every cut point is then a fixed share of n, so the region at size k * g is the region at size
g, times k. Communication is resolved for known sizes only (`Refusal.SYMBOLIC`); this says what is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box, Interval
from hetu_fx.annotations.states import Split


def granule(annotation: Annotation, dim: int) -> int:
    """Give the smallest size of `dim` that the annotation fits; all that fit are its multiples."""
    top = annotation.top if isinstance(annotation.top, Split) and annotation.top.dim == dim else None
    outer, inner, total = (top.outer, top.inner, sum(top.units)) if top else (1, 1, 1)
    pieces = [outer * inner * unit for unit in (top.units if top else [1] * len(annotation.groups))]
    factor = 1
    for piece, sharding in zip(pieces, annotation.shardings, strict=True):
        for split in sharding.splits:
            if split.dim == dim:
                needs = split.outer * split.inner * sum(split.units)
                factor = math.lcm(factor, needs // math.gcd(needs, piece))
    return outer * inner * total * factor


def describe(annotation: Annotation, shape: Sequence[int | None]) -> str:
    """Write what every rank holds, one line each: its role and its boxes; raise where `shape` does not fit.

    A symbolic dim counts `n0` entries (the number is the dim's): rank 1 of a half of it holds `n0/2:n0`.
    """
    sizes = [granule(annotation, dim) if size is None else size for dim, size in enumerate(shape)]
    lines = []
    for rank in annotation.ranks:
        region = annotation.region(rank, sizes)
        role = region.role if region.summand is None else f"{region.role} {region.summand}"
        boxes = " ".join(_box_text(box, sizes, shape) for box in region.boxes)
        lines.append(f"rank {rank}: {role} of {boxes or 'nothing'}")
    return "\n".join(lines)


def _box_text(box: Box, sizes: Sequence[int], shape: Sequence[int | None]) -> str:
    texts = [
        _interval_text(bounds, size) if known is not None else _share_text(bounds, size, f"n{dim}")
        for dim, (bounds, size, known) in enumerate(zip(box.bounds, sizes, shape, strict=True))
    ]
    return f"[{', '.join(texts)}]"


def _interval_text(bounds: Interval, size: int) -> str:
    return ":" if bounds == (0, size) else f"{bounds[0]}:{bounds[1]}"


def _share_text(bounds: Interval, size: int, name: str) -> str:
    if bounds == (0, size):
        return ":"
    shares = [Fraction(bound, size) for bound in bounds]
    return ":".join(_times(share, name) for share in shares)


def _times(share: Fraction, name: str) -> str:
    if share == 0:
        return "0"
    numerator = name if share.numerator == 1 else f"{share.numerator}*{name}"
    return numerator if share.denominator == 1 else f"{numerator}/{share.denominator}"
