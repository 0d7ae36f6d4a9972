"""Choosing where parameters live: every element once (zero 1 to 3), or where the plan reads it (zero 0).

A home inside the part that a rank reads anyway makes the bridge cheap: replicas then exchange it by one
reduce-scatter and one all-gather among those that read the same part. Shares follow the ranks' weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Sharding, Split
from hetu_fx.annotations.region import Interval, Intervals, whole
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import ZERO, Plan

# A tensor below this many elements is not worth cutting: it goes to one rank, the least loaded.
SMALL = 1024
# A cut whose shares are off by more than this part of the mean is made along another dim, if that helps.
TOLERANCE = 0.1

Shape = tuple[int, ...]
Cells = dict[Interval, list[int]]


def choose_homes(
    plan: Plan, read: Mapping[str, Annotation], shapes: Mapping[str, Shape], weights: Sequence[float]
) -> dict[str, Annotation]:
    """Choose the home of every parameter, near where a plan reads it, in proportion to each rank's weight.

    A rank of weight 0 gets nothing: what the plan reads there has its home on all other ranks.
    """
    able = tuple(rank for rank, weight in enumerate(weights) if weight > 0)
    elsewhere = Annotation.replicated(able)
    compute = {name: read[name] if _able_to_read(read.get(name), able) else elsewhere for name in shapes}
    zero = plan.zero if set(plan.devices) <= set(able) else 1
    return make_home_layouts(shapes, compute, weights, zero)


def _able_to_read(compute: Annotation | None, ranks: Sequence[int]) -> bool:
    """Tell whether all of a parameter's readers, of which there are some, are among `ranks`."""
    return compute is not None and set(compute.ranks) <= set(ranks)


def home_weights(plan: Plan, cluster: Cluster | None, world: int) -> list[float]:
    """Return each rank's `Plan.home_weights`, by the devices' speeds where they are known."""
    ranks = range(0 if plan.homes else world)
    weights = plan.home_weights({rank: 1.0 if cluster is None else cluster.device(rank).speed for rank in ranks})
    return [weights.get(rank, 0.0) for rank in range(world)]


def make_home_layouts(
    shapes: Mapping[str, Shape], compute: Mapping[str, Annotation], weights: Sequence[float], zero: int = 1
) -> dict[str, Annotation]:
    """Choose the home of every parameter; a pure function, the same on every rank.

    Args:
        shapes: global shapes by name.
        compute: where the plan reads each parameter; its home is on the same ranks.
        weights: relative share of the state that each rank can hold.
        zero: 0 keeps a copy wherever the parameter is read; 1, 2 and 3 keep every element once.

    Raises PlanError for another `zero`, or weights that are negative.
    """
    if zero not in ZERO:
        raise PlanError(f"zero is {zero}\nhint: give 0 (copies as the plan reads them) or 1 to 3 (each element once)")
    if min(weights) < 0 or not all(map(math.isfinite, weights)):
        raise PlanError(f"home weights are {list(weights)}\nhint: give {len(weights)} numbers from 0, one per rank")
    if zero == 0:
        return {name: compute[name] for name in shapes}
    shares = dict(enumerate(weights))
    loads = dict.fromkeys(shares, 0.0)
    homes: dict[str, Annotation] = {}
    # Large tensors first, so that the small ones even out what rounding left.
    for name in sorted(shapes, key=lambda name: math.prod(shapes[name]) < SMALL):
        homes[name] = _home_of(shapes[name], compute[name], shares, loads)
        for rank in homes[name].ranks:
            loads[rank] += math.prod(homes[name].region(rank, shapes[name]).local_shape)
    return {name: homes[name] for name in shapes}


def _home_of(shape: Shape, compute: Annotation, shares: Mapping[int, float], loads: Mapping[int, float]) -> Annotation:
    small = math.prod(shape) < SMALL
    cut = _cut_dims(shape, compute)
    readers = [rank for rank in compute.ranks if compute.region(rank, shape).local_shape == shape]
    if readers and (small or not shape):
        return Annotation.on((_lightest(readers, shares, loads),))
    if not cut:
        return _along_best_dim(shape, sorted(compute.ranks), shares)
    factor = _factor(compute, cut[0])
    if len(cut) > 1 or factor is None:
        return _along_best_dim(shape, sorted(compute.ranks), shares)
    outer, inner = factor
    cells = _cells(shape, compute, cut[0], outer, inner)
    if not _disjoint(cells):
        return _by_midpoint(shape[cut[0]], cells, shares, Split(cut[0], (1,), outer, inner))
    if small:
        cells = {cell: [_lightest(ranks, shares, loads)] for cell, ranks in cells.items()}
    return _inside_cells(shape, cells, shares, Split(cut[0], (1,), outer, inner))


def _lightest(ranks: Sequence[int], shares: Mapping[int, float], loads: Mapping[int, float]) -> int:
    able = [rank for rank in ranks if shares[rank] > 0]
    return min(able or ranks, key=lambda rank: (loads[rank] / (shares[rank] or 1.0), rank))


def _cut_dims(shape: Shape, compute: Annotation) -> list[int]:
    regions = [compute.region(rank, shape).dims for rank in compute.ranks]
    return [dim for dim, size in enumerate(shape) if any(dims[dim] != whole(size) for dims in regions)]


def _factor(compute: Annotation, dim: int) -> tuple[int, int] | None:
    """Give the (outer, inner) that all cuts of a dim share, or None where they differ."""
    axes = [axis for sharding in compute.shardings for axis in sharding.axes]
    found = {(axis.outer, axis.inner) for axis in (*axes, compute.top) if isinstance(axis, Split) and axis.dim == dim}
    return found.pop() if len(found) == 1 else None


def _cells(shape: Shape, compute: Annotation, dim: int, outer: int, inner: int) -> Cells:
    """Group the ranks by the interval of the dim's middle factor that they read, in order."""
    middle = shape[dim] // (outer * inner)
    cells: Cells = {}
    for rank in compute.ranks:
        intervals: Intervals = compute.region(rank, shape).dims[dim]
        if intervals:
            start, stop = intervals[0]
            cell = (start // inner, min(stop // inner, middle))
            cells.setdefault(cell, []).append(rank)
    return {cell: sorted(cells[cell]) for cell in sorted(cells)}


def _disjoint(cells: Cells) -> bool:
    return all(left[1] <= right[0] for left, right in itertools.pairwise(cells))


def _by_midpoint(size: int, cells: Cells, shares: Mapping[int, float], cut: Split) -> Annotation:
    """Cut anew, ranks in the order of what they read, so that most elements live where they are read."""
    order = sorted((start + stop, rank) for (start, stop), ranks in cells.items() for rank in ranks)
    ranks = [rank for _, rank in order]
    units = largest_remainder(size // (cut.outer * cut.inner), [shares[rank] for rank in ranks])
    return _split(ranks, units, cut)


def _inside_cells(shape: Shape, cells: Cells, shares: Mapping[int, float], cut: Split) -> Annotation:
    """Share every cell among its readers, along the dim that is cut already or, if too short, another."""
    weights = {cell: [shares[rank] for rank in ranks] for cell, ranks in cells.items()}
    units = {cell: largest_remainder(cell[1] - cell[0], weights[cell]) for cell in cells}
    error = max(_error(units[cell], weights[cell]) for cell in cells)
    others = [dim for dim in range(len(shape)) if dim != cut.dim and shape[dim] > 1]
    if error > TOLERANCE and others and len(cells) > 1:
        best = min(others, key=lambda dim: max(_dim_error(shape[dim], w) for w in weights.values()))
        if max(_dim_error(shape[best], w) for w in weights.values()) < error:
            return _nested(shape, cells, weights, cut, best)
    ranks = [rank for cell in cells for rank in cells[cell]]
    return _split(ranks, [unit for cell in cells for unit in units[cell]], cut)


def _nested(
    shape: Shape, cells: Cells, weights: Mapping[Interval, Sequence[float]], cut: Split, dim: int
) -> Annotation:
    groups: list[DeviceGroup] = []
    shardings: list[Sharding] = []
    for cell, ranks in cells.items():
        inner = _split(ranks, largest_remainder(shape[dim], weights[cell]), Split(dim, (1,)))
        groups += inner.groups
        shardings += inner.shardings
    top = Split(cut.dim, tuple(stop - start for start, stop in cells), cut.outer, cut.inner)
    return Annotation(tuple(groups), tuple(shardings), top)


def _along_best_dim(shape: Shape, ranks: Sequence[int], shares: Mapping[int, float]) -> Annotation:
    """Cut along the first dim whose shares come out right, or else the one where they do best."""
    weights = [shares[rank] for rank in ranks]
    errors = [_dim_error(size, weights) for size in shape]
    dim = next((d for d, error in enumerate(errors) if error <= TOLERANCE), errors.index(min(errors)))
    return _split(ranks, largest_remainder(shape[dim], weights), Split(dim, (1,)))


def _split(ranks: Sequence[int], units: Sequence[int], cut: Split) -> Annotation:
    """Cut in `units` over those of `ranks` that get any."""
    kept = [(rank, unit) for rank, unit in zip(ranks, units, strict=True) if unit]
    if len(kept) == 1:
        return Annotation.on((kept[0][0],))
    split = Split(cut.dim, tuple(unit for _, unit in kept), cut.outer, cut.inner)
    return Annotation((DeviceGroup(tuple(rank for rank, _ in kept)),), (Sharding((split,)),))


def largest_remainder(size: int, weights: Sequence[float]) -> list[int]:
    """Share `size` whole items in proportion to weights by largest remainder (all zero: equally)."""
    total = sum(weights)
    ideals = [size * weight / total if total else size / len(weights) for weight in weights]
    shares = [math.floor(ideal) for ideal in ideals]
    by_remainder = sorted(range(len(shares)), key=lambda i: (shares[i] - ideals[i], i))
    for position in by_remainder[: size - sum(shares)]:
        shares[position] += 1
    return shares


def _error(units: Sequence[int], weights: Sequence[float]) -> float:
    """Measure how far shares are off, as a part of the mean share."""
    size, total = sum(units), sum(weights)
    ideals = [size * w / total if total else size / len(units) for w in weights]
    return max(abs(u - i) for u, i in zip(units, ideals, strict=True)) * len(units) / max(size, 1)


def _dim_error(size: int, weights: Sequence[float]) -> float:
    return _error(largest_remainder(size, weights), weights)
