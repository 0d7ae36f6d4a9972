"""The two tiers' collectives (Hetu v2 section 5.1 and 5.2): along the axes of a group, and across groups.

Along axes, those of all shardings of a group are refined until they match one to one. A split that spans several
refined axes becomes levels, coarse to fine; a level knows the parts before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import DeviceGroup, Duplicate, Partial, Sharding, Split, State
from hetu_fx.comm_ops.plans.routes import fits, route_kind
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, Steps
from hetu_fx.comm_ops.resolve.intermediates import dual
from hetu_fx.comm_ops.resolve.resolution import AxisStep, TopStep


@dataclass(frozen=True, slots=True)
class SplitLevel:
    """One level of a split: cuts every part of the `coarser` levels by `split.units`."""

    split: Split
    coarser: tuple[int, ...] = ()

    @property
    def ways(self) -> int:
        """Number of parts of this level."""
        return self.split.ways


Atom = SplitLevel | Duplicate | Partial


def along_axes(edge: ReshardEdge) -> Steps | None:
    """Change a group that stays by one collective per axis, or give None where axes or states do not allow it.

    Other than in the paper, several axes and dims may change at once, in the order that moves least.
    """
    if edge.source.top is not None or edge.source.groups != edge.target.groups:
        return None
    refined = refine([annotation.shardings[0] for annotation in (edge.source, edge.target, edge.gradient)])
    if refined is None:
        return None
    before, after, back = refined
    ops = [_axis_op(*states) for states in zip(before, after, back, strict=True)]
    if None in ops or _cuts_what_it_joins(before, ops, after):
        return None
    current, steps = list(before), []
    for axis in _order([op or "" for op in ops], after):
        following = [*current[:axis], after[axis], *current[axis + 1 :]]
        steps.append(_axis_step(edge, ops[axis] or "", axis, current, following, back[axis]))
        current = following
    return tuple(steps)


def across_groups(edge: ReshardEdge) -> Steps | None:
    """Change the top alone by one split collective, or give None where slices would have to change hands."""
    source, target = edge.source, edge.target
    if source.groups != target.groups or source.shardings != target.shardings:
        return None
    route = route_kind(source.top, target.top)
    if route is None or not fits(Transition(source, target, edge.shape)):
        return None
    kind = "partial" if isinstance(edge.gradient.top, Partial) else "duplicate"
    return (TopStep(f"split_{route}", source, target, edge.shape, kind),)


def same_top(edge: ReshardEdge) -> bool:
    """Tell whether groups can be resolved one by one: as many on both sides, under the same top."""
    source, target = edge.source, edge.target
    if source.top is None or source.top != target.top or edge.gradient.top != dual(target.top):
        return False
    members = [{*a.ranks, *b.ranks} for a, b in zip(source.groups, target.groups, strict=True)]
    return sum(map(len, members)) == len(set.union(*members))


def _axis_op(before: Atom, after: Atom, back: Atom) -> str | None:
    """Name the collective for one axis: the bottom-tier table. "" is nothing to do, None is no collective."""
    match before, after:
        case (Duplicate(), Duplicate()):
            return "identity" if isinstance(back, Partial) else ""
        case _ if before == after and not isinstance(back, Partial):
            return ""
        case (Partial(), Duplicate()):
            return "all_reduce"
        case (Partial(), SplitLevel()):
            return "reduce_scatter"
        case (SplitLevel(), Duplicate()):
            return "all_gather"
        case (Duplicate(), SplitLevel()):
            return "local_slice"
    return None


def _cuts_what_it_joins(before: Sequence[Atom], ops: Sequence[str | None], after: Sequence[Atom]) -> bool:
    """Tell whether a dim is cut along one axis and joined along another, where no order of the two fits."""
    joined = {a.split.dim for a, op in zip(before, ops, strict=True) if isinstance(a, SplitLevel) and op}
    cut = {a.split.dim for a, op in zip(after, ops, strict=True) if isinstance(a, SplitLevel) and op}
    return bool(joined & cut)


def _order(ops: Sequence[str], after: Sequence[Atom]) -> list[int]:
    """Order axes so that tensors shrink first and grow last; cuts of a dim coarse to fine, joins fine to coarse."""
    axes = [axis for axis, op in enumerate(ops) if op == "local_slice" and not _refines_a_sum(axis, ops, after)]
    axes += [axis for axis, op in enumerate(ops) if op in ("local_slice", "reduce_scatter") and axis not in axes]
    axes += [axis for axis, op in enumerate(ops) if op in ("identity", "all_reduce")]
    return axes + [axis for axis in reversed(range(len(ops))) if ops[axis] == "all_gather"]


def _refines_a_sum(axis: int, ops: Sequence[str], after: Sequence[Atom]) -> bool:
    """Tell whether this piece cuts what a reduce-scatter along a coarser axis leaves of the same dim."""
    piece = after[axis]
    if not isinstance(piece, SplitLevel) or not piece.coarser:
        return False
    coarser = [atom for atom, op in zip(after[:axis], ops[:axis], strict=True) if op == "reduce_scatter"]
    return any(isinstance(atom, SplitLevel) and atom.split.dim == piece.split.dim for atom in coarser)


def _axis_step(
    edge: ReshardEdge, op: str, axis: int, before: Sequence[Atom], after: Sequence[Atom], back: Atom
) -> AxisStep:
    (group,) = edge.source.groups
    piece = next((atom for atom in (before[axis], after[axis]) if isinstance(atom, SplitLevel)), None)
    return AxisStep(
        op,
        _restored(group, before),
        _restored(group, after),
        edge.shape,
        interval=math.prod(atom.ways for atom in after[axis + 1 :]),
        ways=after[axis].ways,
        split=piece.split if piece else None,
        cotangent="partial" if isinstance(back, Partial) else "duplicate",
    )


def _restored(group: DeviceGroup, atoms: Sequence[Atom]) -> Annotation:
    return Annotation((group,), (restore(atoms),))


def refine(shardings: Sequence[Sharding]) -> list[tuple[Atom, ...]] | None:
    """Cut the axes of all `shardings` at their common boundaries, or give None where they do not nest.

    They must need the same number of devices. Uneven splits nest only where their units factor.
    """
    boundaries = sorted({stride for sharding in shardings for stride in _strides(sharding)}, reverse=True)
    ways = [high // low for high, low in itertools.pairwise(boundaries)]
    if math.prod(ways) != boundaries[0]:
        return None
    refined = [_refine_one(sharding, ways) for sharding in shardings]
    return [atoms for atoms in refined if atoms is not None] if None not in refined else None


def restore(atoms: Sequence[Atom]) -> Sharding:
    """Put refined axes together again."""
    axes: list[State] = []
    for atom in atoms:
        match atom:
            case SplitLevel(split, coarser) if coarser:
                axes[-1] = Split(split.dim, _outer_product(coarser, split.units), split.outer, split.inner)
            case SplitLevel(split):
                axes.append(split)
            case _:
                axes.append(atom)
    return Sharding(tuple(axes))


def _strides(sharding: Sharding) -> list[int]:
    strides = [1]
    for axis in reversed(sharding.axes):
        strides.append(strides[-1] * axis.ways)
    return strides


def _refine_one(sharding: Sharding, ways: Sequence[int]) -> tuple[Atom, ...] | None:
    atoms: list[Atom] = []
    remaining = list(ways)
    for axis in sharding.axes:
        levels: list[int] = []
        while math.prod(levels) < axis.ways:
            levels.append(remaining.pop(0))
        pieces = _levels(axis, levels)
        if pieces is None:
            return None
        atoms += pieces
    return tuple(atoms)


def _levels(axis: State, levels: Sequence[int]) -> list[Atom] | None:
    match axis:
        case Split():
            return _split_levels(axis, levels)
        case Duplicate():
            return [Duplicate(ways) for ways in levels]
        case Partial():
            return [Partial(ways) for ways in levels]


def _split_levels(split: Split, levels: Sequence[int]) -> list[Atom] | None:
    pieces: list[Atom] = []
    rest = split.units
    coarser: tuple[int, ...] = ()
    for ways in levels:
        factored = _factor(rest, ways)
        if factored is None:
            return None
        units, rest = factored
        pieces.append(SplitLevel(Split(split.dim, units, split.outer, split.inner), coarser))
        coarser = _outer_product(coarser, units) if coarser else units
    return pieces


def _factor(units: tuple[int, ...], ways: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Write `units` as the outer product of `ways` coarse and the other fine units, if it is one."""
    width = len(units) // ways
    rows = [units[start : start + width] for start in range(0, len(units), width)]
    scales = tuple(math.gcd(*row) for row in rows)
    fine = {tuple(unit // scale for unit in row) for row, scale in zip(rows, scales, strict=True) if scale}
    return (scales, fine.pop()) if len(fine) == 1 else None


def _outer_product(coarse: Sequence[int], fine: Sequence[int]) -> tuple[int, ...]:
    return tuple(a * b for a in coarse for b in fine)
