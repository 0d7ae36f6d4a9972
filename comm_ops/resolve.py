"""One annotation into another: the only place that knows how (Hetu v2 section 5).

Tried in order: nothing to do; a collective per axis inside each group (bottom tier); a split collective
across groups (top tier); bottom then top; batched send-receive, which fits every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.device_group import DeviceGroup
from hetu_fx.annotations.sharding import Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split, State
from hetu_fx.comm_ops.axes import Atom, Piece, refine, restore
from hetu_fx.comm_ops.change import Change, format_shape
from hetu_fx.comm_ops.resolution import AxisStep, CommStep, MoveStep, Resolution, TopStep
from hetu_fx.comm_ops.split_plan import fits
from hetu_fx.errors import AnnotationError, ResolveError

_Steps = tuple[CommStep, ...]


def resolve(source: Annotation, target: Annotation, shape: Sequence[int | None]) -> Resolution:
    """Find the steps from `source` to `target` for a tensor of global `shape` (None: symbolic, never split).

    The gradient of the result is taken to be `cotangent(target)`. Raises ResolveError where an annotation
    does not fit the shape.
    """
    return resolve_edge(source, target, cotangent(target), shape)


def resolve_edge(
    source: Annotation, target: Annotation, target_cotangent: Annotation, shape: Sequence[int | None]
) -> Resolution:
    """Find the steps as `resolve` does, with adjoints from `target_cotangent` back to cotangent(source).

    `target_cotangent` is cotangent(target), but for duplicates that may be partial there. Raises ResolveError
    where it is something else, or where an annotation does not fit the shape.
    """
    return _resolve(source, target, target_cotangent, tuple(shape))


@lru_cache(maxsize=16384)
def _resolve(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> Resolution:
    _check(source, target, gradient, shape)
    steps = _first_fit(source, target, gradient, shape)
    return Resolution(source, target, shape, steps)


def _first_fit(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> _Steps:
    if gradient == cotangent(target) and _same_regions(source, target, shape):
        return ()
    flat = [flatten(annotation) for annotation in (source, target, gradient)]
    if all(annotation.top is None for annotation in flat):
        source, target, gradient = flat
    for attempt in (_bottom, _top, _bottom_then_top):
        steps = attempt(source, target, gradient, shape)
        if steps is not None:
            return steps
    return (MoveStep(source, target, gradient, shape),)


def flatten(annotation: Annotation) -> Annotation:
    """Write a union of equal shardings as one group, its slowest axis the top, where that means the same."""
    top, sharding = annotation.top, annotation.shardings[0]
    if top is None or any(other != sharding for other in annotation.shardings):
        return annotation
    if isinstance(top, Duplicate) and sharding.num_summands > 1:
        # Groups hold equal values, but need not hold equal summands; copies inside a group do.
        return annotation
    if isinstance(top, Split) and any(split.dim == top.dim for split in sharding.splits):
        return annotation
    return Annotation.on(annotation.ranks, top, *sharding.axes)


def _check(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> None:
    if cotangent(gradient) != cotangent(target):
        raise ResolveError(
            f"{gradient} cannot annotate the gradient of {target}: it may differ only in duplicates that are "
            "partial in the gradient"
        )
    for annotation in (source, target):
        try:
            annotation.check_shape(shape)
        except AnnotationError as error:
            raise ResolveError(f"{source} -> {target} of {format_shape(shape)}: {error}") from error


def _same_regions(source: Annotation, target: Annotation, shape: Shape) -> bool:
    if source == target:
        return True
    if source.has_partial or target.has_partial or set(source.ranks) != set(target.ranks):
        return False
    return all(source.region(rank, shape) == target.region(rank, shape) for rank in source.ranks)


def _bottom(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> _Steps | None:
    """Resolve every group alone, where groups and top stay."""
    if source.groups != target.groups or source.top != target.top or gradient.top != _dual(target.top):
        return None
    steps: list[CommStep] = []
    for index, group in enumerate(source.groups):
        before, after, back = (annotation.shardings[index] for annotation in (source, target, gradient))
        piece = _piece(source.top, index, shape)
        steps += _inside(group, before, after, back, piece)
    return tuple(steps)


def _inside(group: DeviceGroup, before: Sharding, after: Sharding, back: Sharding, shape: Shape) -> _Steps:
    if before == after and back == Sharding(tuple(map(_dual_state, after.axes))):
        return ()
    steps = _along_axes(group, before, after, back, shape)
    if steps is not None:
        return steps
    source, target, gradient = (Annotation((group,), (sharding,)) for sharding in (before, after, back))
    return (MoveStep(source, target, gradient, shape),)


def _along_axes(group: DeviceGroup, before: Sharding, after: Sharding, back: Sharding, shape: Shape) -> _Steps | None:
    refined = refine((before, after, back))
    if refined is None:
        return None
    ops = [_axis_op(*states) for states in zip(*refined, strict=True)]
    if None in ops or _cuts_what_it_joins(refined[0], ops, refined[1]):
        return None
    current, steps = list(refined[0]), []
    for axis in _order([op or "" for op in ops], refined[1]):
        following = [*current[:axis], refined[1][axis], *current[axis + 1 :]]
        steps.append(_axis_step(group, ops[axis] or "", axis, (current, following, refined[2]), shape))
        current = following
    return tuple(steps)


def _axis_op(before: Atom, after: Atom, back: Atom) -> str | None:
    """Name the collective for one axis: the bottom-tier table. "" is nothing to do, None is no collective."""
    match before, after:
        case (Duplicate(), Duplicate()):
            return "identity" if isinstance(back, Partial) else ""
        case _ if before == after and not isinstance(back, Partial):
            return ""
        case (Partial(), Duplicate()):
            return "all_reduce"
        case (Partial(), Piece()):
            return "reduce_scatter"
        case (Piece(), Duplicate()):
            return "all_gather"
        case (Duplicate(), Piece()):
            return "local_slice"
    return None


def _cuts_what_it_joins(before: Sequence[Atom], ops: Sequence[str | None], after: Sequence[Atom]) -> bool:
    """Tell whether a dim is cut along one axis and joined along another, where no order of the two fits."""
    joined = {a.split.dim for a, op in zip(before, ops, strict=True) if isinstance(a, Piece) and op}
    cut = {a.split.dim for a, op in zip(after, ops, strict=True) if isinstance(a, Piece) and op}
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
    if not isinstance(piece, Piece) or not piece.coarser:
        return False
    coarser = [atom for atom, op in zip(after[:axis], ops[:axis], strict=True) if op == "reduce_scatter"]
    return any(isinstance(atom, Piece) and atom.split.dim == piece.split.dim for atom in coarser)


def _axis_step(
    group: DeviceGroup,
    op: str,
    axis: int,
    atoms: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    shape: Shape,
) -> AxisStep:
    before, after, back = atoms
    piece = next((atom for atom in (before[axis], after[axis]) if isinstance(atom, Piece)), None)
    interval = 1
    for atom in after[axis + 1 :]:
        interval *= atom.ways
    return AxisStep(
        op,
        Annotation((group,), (restore(before),)),
        Annotation((group,), (restore(after),)),
        shape,
        interval,
        after[axis].ways,
        piece.split if piece else None,
        "partial" if isinstance(back[axis], Partial) else "duplicate",
    )


def _top(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> _Steps | None:
    """Use a split collective, where only the top changes."""
    if source.groups != target.groups or source.shardings != target.shardings:
        return None
    op = _top_op(source.top, target.top)
    if op is None or gradient.shardings != cotangent(target).shardings:
        return None
    if not fits(Change(source, target, shape)):
        return None
    kind = "partial" if isinstance(gradient.top, Partial) else "duplicate"
    return (TopStep(op, source, target, shape, kind),)


def _top_op(before: State | None, after: State | None) -> str | None:
    match before, after:
        case Partial(), Duplicate():
            return "split_all_reduce"
        case Partial(), Split():
            return "split_reduce_scatter"
        case Split(), Duplicate():
            return "split_all_gather"
    return None


def _bottom_then_top(source: Annotation, target: Annotation, gradient: Annotation, shape: Shape) -> _Steps | None:
    """Give every group its target sharding first, then change the top."""
    if source.groups != target.groups or source.top == target.top:
        return None
    middle = Annotation(source.groups, target.shardings, source.top)
    if not _fits_shape(middle, shape):
        return None
    first = _bottom(source, middle, cotangent(middle), shape)
    second = _top(middle, target, gradient, shape)
    return None if first is None or second is None else first + second


def _fits_shape(annotation: Annotation, shape: Shape) -> bool:
    try:
        annotation.check_shape(shape)
    except AnnotationError:  # a middle annotation is our own guess, so not fitting only rules it out
        return False
    return True


def _piece(top: State | None, index: int, shape: Shape) -> Shape:
    if not isinstance(top, Split):
        return shape
    size = shape[top.dim]
    if size is None:
        raise ResolveError(f"cannot split dim {top.dim} of {format_shape(shape)}: it is symbolic")
    return (*shape[: top.dim], top.local_size(size, index), *shape[top.dim + 1 :])


def _dual_state(state: State) -> State:
    return Duplicate(state.ways) if isinstance(state, Partial) else state


def _dual(top: State | None) -> State | None:
    return None if top is None else _dual_state(top)
