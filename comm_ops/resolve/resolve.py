"""One annotation into another: the only place that knows how (Hetu v2 section 5).

A way proposes steps that make a change, or nothing where it does not apply. The ways are tried in the paper's order:
bottom tier, top tier, both, batched send-receive; then those that go beyond it. The cheapest proposal is taken, unless
an earlier one cannot be beaten (`StepPrices`). `Refusal` has the closed list of reasons why a change is not resolved;
every other change is.

The two tiers' collectives (Hetu v2 section 5.1 and 5.2): along the axes of a group, and across groups. Along axes,
those of all shardings of a group are refined until they match one to one. A split that spans several refined axes
becomes levels, coarse to fine; a level knows the parts before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import DeviceGroup, Duplicate, Partial, Sharding, Split, State
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.routes import fits, route_kind
from hetu_fx.comm_ops.plans.transition import Transition, format_shape
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, StepPrices, Steps
from hetu_fx.comm_ops.resolve.intermediates import (
    cut_copies,
    dual,
    partial_on_top,
    reduced_annotations,
    scattered_annotations,
)
from hetu_fx.comm_ops.resolve.resolution import AxisStep, MoveStep, Resolution, TopStep
from hetu_fx.errors import AnnotationError, ResolveError


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


def resolve(
    source: Annotation,
    target: Annotation,
    shape: Sequence[int | None],
    target_cotangent: Annotation | None = None,
    *,
    topology: Topology | None = None,
    itemsize: int = 4,
) -> Resolution:
    """Find the steps from `source` to `target`, and their adjoints, from `target_cotangent` to cotangent(source).

    Among several ways the fastest on the links of `topology` is taken; without one, the way that moves fewest bytes.

    Args:
        source, target: annotations of the tensor.
        shape: its global sizes; None: symbolic, and never split.
        target_cotangent: annotation of the result's gradient. None: cotangent(target), from which it can differ only
            in duplicates that are partial.
        topology: the links, hashable.
        itemsize: bytes of an entry.

    Raises:
        RefusedError: a ResolveError with one of the reasons of `Refusal`.
    """
    gradient = cotangent(target) if target_cotangent is None else target_cotangent
    return _resolve(source, target, gradient, tuple(shape), StepPrices(topology, itemsize))


@lru_cache(maxsize=16384)
def _resolve(
    source: Annotation, target: Annotation, gradient: Annotation, shape: Shape, prices: StepPrices
) -> Resolution:
    _check_gradient(target, gradient)
    for annotation in (source, target):
        _check_fits(annotation, shape, f"{source} -> {target}")
    return Resolution(source, target, shape, _best(ReshardEdge(source, target, gradient, shape), prices))


def _best(edge: ReshardEdge, prices: StepPrices) -> Steps:
    """Take the cheapest steps found; on links also what moves fewest bytes is priced.

    Groups are resolved one by one, so that the fastest way of each need not be the fastest of all together.
    """
    if prices.topology is None:
        return _cheapest(edge, prices)
    fewest_bytes = _cheapest(edge, replace(prices, topology=None))
    return min(_cheapest(edge, prices), fewest_bytes, key=prices.of)


def _cheapest(edge: ReshardEdge, prices: StepPrices) -> Steps:
    if edge.is_idle:
        return ()
    edge = edge.flat
    proposals: list[Steps] = []
    for strategy in _STRATEGIES:
        for steps in strategy(edge, prices):
            if prices.settles(edge, steps):
                return steps
            proposals.append(steps)
    return min(proposals, key=prices.of) if len(proposals) > 1 else proposals[0]


def _by_axes(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Change one group by collectives along its axes."""
    steps = along_axes(edge)
    if steps is not None:
        yield steps


def _by_group(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Resolve every group alone, each in its own way, where groups pair up under the same top.

    Where every group would be moved, one move of all does it in fewer messages.
    """
    if same_top(edge):
        steps = _inside(edge, prices)
        if not all(isinstance(step, MoveStep) for step in steps) or edge.source.has_partial:
            yield steps


def _by_summand(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Move every summand to its counterpart, where as many are asked for as there are."""
    source, target = partial_on_top(edge.source), partial_on_top(edge.target)
    if edge.is_plain and source and target and (source, target) != (edge.source, edge.target):
        yield from _by_group(ReshardEdge.plain(source, target, edge.shape), prices)


def _by_both_tiers(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Change the top by a split collective, and the groups before it, after it or both.

    The paper gives every group its target sharding first. Also tried: last; and cutting copies up in between, so
    that no entry crosses groups once per copy.
    """
    source, target = edge.source, edge.target
    if source.groups != target.groups or source.top == target.top:
        return
    middles = [target.shardings, source.shardings, *(cut_copies(side, edge.shape) for side in (source, target))]
    for shardings in dict.fromkeys(middles):
        steps = _through(edge, shardings, prices)
        if steps is not None:
            yield steps


def _through(edge: ReshardEdge, shardings: tuple[Sharding, ...], prices: StepPrices) -> Steps | None:
    """Go bottom, top, bottom, with `shardings` in the middle, or give None where that does not fit."""
    source, target, shape = edge.source, edge.target, edge.shape
    before, after = (Annotation(source.groups, shardings, top) for top in (source.top, target.top))
    if not (_fits(before, shape) and _fits(after, shape)):
        return None
    back = cotangent(after)
    top = across_groups(ReshardEdge(before, after, Annotation(back.groups, back.shardings, edge.gradient.top), shape))
    if top is None:
        return None
    # Inside the groups the gradient's state across them does not matter.
    last = Annotation(target.groups, edge.gradient.shardings, dual(target.top))
    sides = ReshardEdge.plain(source, before, shape), ReshardEdge(after, target, last, shape)
    first, second = (_inside(side, prices) for side in sides)
    return (*first, *top, *second)


def _inside(edge: ReshardEdge, prices: StepPrices) -> Steps:
    """Resolve every group alone."""
    groups = range(len(edge.source.groups))
    return tuple(step for index in groups for step in _cheapest(edge.of_group(index), prices))


def _by_moving(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Move all there is in one batched send-receive; fits every change."""
    yield (edge.move,)


def _by_reducing_and_gathering(edge: ReshardEdge, prices: StepPrices) -> Iterator[Steps]:
    """Sum where the summands are before a move, gather where the copies shall be after it, or both."""
    befores = reduced_annotations(edge.source, edge.shape)
    afters = scattered_annotations(edge.target, edge.shape)
    for before in (edge.source, *befores):
        for after in (edge.target, *afters):
            steps = _by_way_of(edge, before, after, prices)
            if steps is not None:
                yield steps


def _by_way_of(edge: ReshardEdge, before: Annotation, after: Annotation, prices: StepPrices) -> Steps | None:
    first = _collectives(ReshardEdge.plain(edge.source, before, edge.shape), prices)
    last = (
        _collectives(ReshardEdge(after, edge.target, edge.gradient, edge.shape), prices) if after != edge.target else ()
    )
    gradient = edge.gradient if after == edge.target else cotangent(after)
    middle = ReshardEdge(before, after, gradient, edge.shape)
    if first is None or last is None or not (first or last):
        return None
    return (*first, *(() if middle.is_idle else (middle.move,)), *last)


def _collectives(edge: ReshardEdge, prices: StepPrices) -> Steps | None:
    """Return steps that move nothing beside collectives, or None."""
    if edge.is_idle:
        return ()
    edge = edge.flat
    for strategy in (_by_axes, _by_group, _by_both_tiers):
        for steps in strategy(edge, prices):
            if not any(isinstance(step, MoveStep) for step in steps):
                return steps
    return None


def _fits(annotation: Annotation, shape: Shape) -> bool:
    try:
        annotation.check_shape(shape)
    except AnnotationError:  # a middle annotation is our own guess, so not fitting only rules it out
        return False
    return True


_STRATEGIES: tuple[Callable[[ReshardEdge, StepPrices], Iterator[Steps]], ...] = (
    _by_axes,
    _by_group,
    _by_both_tiers,
    _by_moving,
    _by_summand,
    _by_reducing_and_gathering,
)


class Refusal(Enum):
    """Says why, and what to do instead."""

    NO_SUCH_DIM = "an annotation splits a dim that the tensor has not\nhint: annotate the tensor's own dims"
    SYMBOLIC = "a split dim has no known size\nhint: resolve again for every size, or split another dim"
    SIZE = "a size does not divide into the parts of a split\nhint: choose parts whose sum divides it"
    GRADIENT = (
        "the gradient's annotation does not belong to the target; it may differ from cotangent(target) only in "
        "duplicates that are partial"
    )


class RefusedError(ResolveError):
    """A change that is not resolved; `reason` is one of the closed list."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _check_fits(annotation: Annotation, shape: Shape, what: str) -> None:
    """Raise RefusedError where a tensor of `shape` cannot be annotated so."""
    try:
        annotation.check_shape(shape)
    except AnnotationError as error:
        raise RefusedError(_why(annotation, shape), f"{what} of {format_shape(shape)}: {error}") from error


def _check_gradient(target: Annotation, gradient: Annotation) -> None:
    """Raise RefusedError where `gradient` cannot annotate the gradient of what `target` annotates."""
    if cotangent(gradient) != cotangent(target):
        raise RefusedError(
            Refusal.GRADIENT,
            f"{gradient} cannot annotate the gradient of {target}: {Refusal.GRADIENT.value}",
        )


def _why(annotation: Annotation, shape: Shape) -> Refusal:
    tops = (annotation.top,) if isinstance(annotation.top, Split) else ()
    dims = {split.dim for split in (*tops, *(s for sharding in annotation.shardings for s in sharding.splits))}
    if max(dims) >= len(shape):
        return Refusal.NO_SUCH_DIM
    return Refusal.SYMBOLIC if any(shape[dim] is None for dim in dims) else Refusal.SIZE
