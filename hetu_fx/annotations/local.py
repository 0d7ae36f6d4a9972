"""Take slices out of dense tensors and put them in: boxes, products of intervals, and a device's part by annotation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, cat

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box, Intervals


def index(box: Box) -> tuple[slice, ...]:
    """Turn a box into the index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box.bounds)


def take_slice(x: Tensor, where: Sequence[Intervals | None]) -> Tensor:
    """Take the slice `where` (None: a whole dim), which is not empty, out of `x`: a view for one box, else a copy."""
    for dim, intervals in enumerate(where):
        if intervals is None:
            continue
        pieces = [x.narrow(dim, start, stop - start) for start, stop in intervals]
        x = pieces[0] if len(pieces) == 1 else cat(pieces, dim)
    return x


def write(x: Tensor, where: Sequence[Intervals | None], value: Tensor, *, adds: bool = False) -> None:
    """Put `value` into the slice `where` of `x`, or add it there."""
    for dim, intervals in enumerate(where):
        if intervals is None:
            continue
        if len(intervals) > 1:
            return _write_pieces(x, where, dim, value, adds=adds)
        start, stop = intervals[0]
        x = x.narrow(dim, start, stop - start)
    if adds:
        x.add_(value)
    else:
        x.copy_(value)


def _write_pieces(x: Tensor, where: Sequence[Intervals | None], dim: int, value: Tensor, *, adds: bool) -> None:
    done = 0
    rest = [None] * (dim + 1) + list(where[dim + 1 :])
    for start, stop in where[dim] or ():
        piece = value.narrow(dim, done, stop - start)
        write(x.narrow(dim, start, stop - start), rest, piece, adds=adds)
        done += stop - start


def local_part(whole: Tensor, annotation: Annotation, rank: int) -> Tensor:
    """Return a rank's part of a whole tensor; a view where it is one box, else a copy."""
    region = annotation.region(rank, tuple(whole.shape))
    if 0 in region.local_shape:
        return whole.new_empty(region.local_shape)
    part = take_slice(whole, region.dims)
    return part if all(len(intervals) == 1 for intervals in region.dims) else part.contiguous()


def write_part(whole: Tensor, part: Tensor, annotation: Annotation, rank: int) -> None:
    """Write a rank's part into a whole tensor."""
    if part.numel():
        write(whole, annotation.region(rank, tuple(whole.shape)).dims, part)
