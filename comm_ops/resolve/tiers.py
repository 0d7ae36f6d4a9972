"""The two tiers' collectives (Hetu v2 section 5.1 and 5.2): along the axes of a group, and across groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.sharding import DeviceGroup
from hetu_fx.annotations.states import Duplicate, Partial
from hetu_fx.comm_ops.plans.axes import Atom, SplitLevel, refine, restore
from hetu_fx.comm_ops.plans.routes import kind_between
from hetu_fx.comm_ops.plans.split_plan import fits
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, Steps, dual
from hetu_fx.comm_ops.resolve.resolution import AxisStep, TopStep


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
    route = kind_between(source.top, target.top)
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
