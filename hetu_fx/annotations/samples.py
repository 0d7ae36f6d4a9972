"""Random annotations, for property tests of whatever takes annotations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.device_group import DeviceGroup
from hetu_fx.annotations.sharding import Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split, State
from hetu_fx.errors import AnnotationError


def random_annotation(
    random: Random,
    ranks: Sequence[int],
    shape: tuple[int, ...],
    *,
    partial: bool = True,
    groups: Sequence[DeviceGroup] | None = None,
) -> Annotation:
    """Draw an annotation of some of `ranks`, in some order, or of the given `groups`, that fits `shape`.

    One to three groups, with every kind of state on both tiers, uneven and zero units and sub-factors.
    """
    while True:
        try:
            annotation = _draw(random, tuple(groups or _groups(random, ranks)), shape, partial)
            annotation.check_shape(shape)
        except AnnotationError:  # drawn blindly, so drawn again where it does not fit
            continue
        return annotation


def random_cotangent(random: Random, annotation: Annotation) -> Annotation:
    """Draw a gradient's annotation: some of the duplicates become partial, every partial a duplicate."""
    shardings = tuple(Sharding(tuple(_dual(random, axis) for axis in s.axes)) for s in annotation.shardings)
    top = None if annotation.top is None else _dual(random, annotation.top)
    return Annotation(annotation.groups, shardings, top)


def _dual(random: Random, state: State) -> State:
    match state:
        case Partial(ways):
            return Duplicate(ways)
        case Duplicate(ways) if random.random() < 0.3:
            return Partial(ways)
    return state


def _groups(random: Random, ranks: Sequence[int]) -> list[DeviceGroup]:
    chosen = random.sample(list(ranks), random.randint(1, len(ranks)))
    if random.random() < 0.5:
        chosen.sort()
    number = min(random.choice((1, 1, 2, 2, 3)), len(chosen))
    cuts = [0, *sorted(random.sample(range(1, len(chosen)), number - 1)), len(chosen)]
    return [DeviceGroup(tuple(chosen[start:stop])) for start, stop in itertools.pairwise(cuts)]


def _draw(random: Random, groups: tuple[DeviceGroup, ...], shape: tuple[int, ...], partial: bool) -> Annotation:
    shardings = tuple(Sharding(_axes(random, len(group), shape, partial)) for group in groups)
    top = _state(random, len(groups), shape, partial) if len(groups) > 1 else None
    return Annotation(groups, shardings, top)


def _axes(random: Random, ways: int, shape: tuple[int, ...], partial: bool) -> tuple[State, ...]:
    axes: list[State] = []
    while ways > 1:
        factor = random.choice([f for f in range(2, ways + 1) if ways % f == 0])
        axes.append(_state(random, factor, shape, partial))
        ways //= factor
    return tuple(axes)


def _state(random: Random, ways: int, shape: tuple[int, ...], partial: bool) -> State:
    kind = random.choice(("split", "split", "duplicate", "partial" if partial else "split"))
    if kind == "duplicate":
        return Duplicate(ways)
    if kind == "partial":
        return Partial(ways)
    units = tuple(random.choice((1, 1, 1, 2, 0)) for _ in range(ways))
    outer, inner = random.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    return Split(random.randrange(len(shape)), units, outer, inner)
