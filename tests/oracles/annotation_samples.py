"""Random annotations, for property tests of whatever takes annotations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import DeviceGroup, Duplicate, Partial, Sharding, Split, State
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
    """Draw a source and a target, related often enough that no way of resolving a change goes untried."""
    while True:
        try:
            source, target = random.choice(_PAIRS)(random, ranks, shape, partial)
            target.check_shape(shape)
        except AnnotationError:  # related blindly, so drawn again where it does not fit
            continue
        return source, target


def random_cotangent(random: Random, annotation: Annotation) -> Annotation:
    """Draw a gradient's annotation: some of the duplicates become partial, every partial a duplicate."""
    shardings = tuple(Sharding(tuple(_dual(random, axis) for axis in s.axes)) for s in annotation.shardings)
    top = None if annotation.top is None else _dual(random, annotation.top)
    return Annotation(annotation.groups, shardings, top)


_Pair = tuple[Annotation, Annotation]


def _unrelated(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    first, second = (random_annotation(random, ranks, shape, partial=partial) for _ in range(2))
    return first, second


def _on_the_same_groups(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    source = random_annotation(random, ranks, shape, partial=partial)
    return source, random_annotation(random, ranks, shape, partial=partial, groups=source.groups)


def _on_other_devices(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    middle = len(ranks) // 2
    source = random_annotation(random, ranks[:middle], shape, partial=partial)
    return source, random_annotation(random, ranks[middle:], shape, partial=partial)


def _by_axes(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    """Change the states of some axes, as a collective does."""
    source = random_annotation(random, ranks, shape, partial=partial)
    shardings = tuple(Sharding(_changed(random, s.axes, shape, partial, 0.5)) for s in source.shardings)
    tops = () if source.top is None else (source.top,)
    (top,) = _changed(random, tops, shape, partial, 0.3) or (None,)
    return source, Annotation(source.groups, shardings, top)


def _by_top(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    source = random_annotation(random, ranks, shape, partial=partial)
    tops = () if source.top is None else (source.top,)
    (top,) = _changed(random, tops, shape, partial, 1.0) or (None,)
    return source, Annotation(source.groups, source.shardings, top)


def _group_by_group(random: Random, ranks: Sequence[int], shape: tuple[int, ...], partial: bool) -> _Pair:
    """Keep the top and some of the groups; the others give way to a part of their devices, or to spare ones."""
    source = random_annotation(random, ranks, shape, partial=partial)
    spare = [rank for rank in ranks if not source.holds(rank)]
    groups = []
    for group in source.groups:
        count = random.randint(1, len(group)) if random.random() < 0.5 else 0
        groups.append(DeviceGroup(group.ranks[:count]) if count else group)
    if spare:
        groups[random.randrange(len(groups))] = DeviceGroup(tuple(spare))
    target = random_annotation(random, ranks, shape, partial=partial, groups=groups)
    return source, Annotation(target.groups, target.shardings, source.top)


_PAIRS = (_unrelated, _on_the_same_groups, _on_other_devices, _by_axes, _by_axes, _by_top, _group_by_group)


def _changed(
    random: Random, axes: Sequence[State], shape: tuple[int, ...], partial: bool, share: float
) -> tuple[State, ...]:
    return tuple(_state(random, a.ways, shape, partial) if random.random() < share else a for a in axes)


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
