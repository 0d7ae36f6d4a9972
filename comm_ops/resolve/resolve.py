"""One annotation into another: the only place that knows how (Hetu v2 section 5).

A way proposes steps that make a change, or nothing where it does not apply. The ways are tried in the paper's order:
bottom tier, top tier, both, batched send-receive; then those that go beyond it. The cheapest proposal is taken, unless
an earlier one cannot be beaten (`StepPrices`). `Refusal` has the closed list of reasons why a change is not resolved;
every other change is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import Sharding, Split
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.transition import format_shape
from hetu_fx.comm_ops.resolve.edge import ReshardEdge, StepPrices, Steps
from hetu_fx.comm_ops.resolve.intermediates import (
    cut_copies,
    dual,
    partial_on_top,
    reduced_annotations,
    scattered_annotations,
)
from hetu_fx.comm_ops.resolve.resolution import MoveStep, Resolution
from hetu_fx.comm_ops.resolve.tiers import across_groups, along_axes, same_top
from hetu_fx.errors import AnnotationError, ResolveError


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
