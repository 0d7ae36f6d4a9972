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
    most_groups: int = 4,
) -> Annotation:
    """Draw an annotation of some of `ranks`, in some order, or of the given `groups`, that fits `shape`.

    One to `most_groups` groups, with every kind of state on both tiers, uneven and zero units and sub-factors.
    """
    while True:
        try:
            annotation = _draw(random, tuple(groups or _groups(random, ranks, most_groups)), shape, partial)
            annotation.check_shape(shape)
        except AnnotationError:  # drawn blindly, so drawn again where it does not fit
            continue
        return annotation


def random_pair(
    random: Random, ranks: Sequence[int], shape: tuple[int, ...], *, partial: bool = True
) -> tuple[Annotation, Annotation]:
    """Draw a source and a target, related often enough that no way of resolving a change goes untried.

    Unrelated; on the same groups; with the same top as well; differing in the top alone; on disjoint devices.
    """
    kind = random.choice(("any", "any", "groups", "top", "shardings", "disjoint"))
    if kind == "disjoint" and len(ranks) > 1:
        half = random.randrange(1, len(ranks))
        source = random_annotation(random, ranks[:half], shape, partial=partial)
        return source, random_annotation(random, ranks[half:], shape, partial=partial)
    source = random_annotation(random, ranks, shape, partial=partial)
    same = None if kind in ("any", "disjoint") else source.groups
    target = random_annotation(random, ranks, shape, partial=partial, groups=same)
    return source, _alike(source, target, kind, shape)


def random_cotangent(random: Random, annotation: Annotation) -> Annotation:
    """Draw a gradient's annotation: some of the duplicates become partial, every partial a duplicate."""
    shardings = tuple(Sharding(tuple(_dual(random, axis) for axis in s.axes)) for s in annotation.shardings)
    top = None if annotation.top is None else _dual(random, annotation.top)
    return Annotation(annotation.groups, shardings, top)


def _alike(source: Annotation, target: Annotation, kind: str, shape: tuple[int, ...]) -> Annotation:
    """Give the target the source's top or shardings, if it still fits."""
    try:
        match kind:
            case "top":
                mixed = Annotation(target.groups, target.shardings, source.top)
            case "shardings":
                mixed = Annotation(target.groups, source.shardings, target.top)
            case _:
                return target
        mixed.check_shape(shape)
    except AnnotationError:  # mixed blindly
        return target
    return mixed


def _dual(random: Random, state: State) -> State:
    match state:
        case Partial(ways):
            return Duplicate(ways)
        case Duplicate(ways) if random.random() < 0.3:
            return Partial(ways)
    return state


def _groups(random: Random, ranks: Sequence[int], most: int) -> list[DeviceGroup]:
    chosen = random.sample(list(ranks), random.randint(1, len(ranks)))
    if random.random() < 0.5:
        chosen.sort()
    number = min(random.choice((1, 1, 2, 2, 3, 4)), most, len(chosen))
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
