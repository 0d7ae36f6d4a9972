"""What a call of a leaf takes, by the sizes of what it is given: FLOPs, memory traffic and ops of its forward.

It is counted while the leaf is called before it is an op (`leaves.probe`), with the example's sizes and with others. A
size that changes alone gives a curve of it: the parabola through three sizes, or, where that says that something
becomes less with more rows (the values decide, not the sizes), a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.torch_private import TorchDispatchMode, has_schema, schema, tree_leaves
from hetu_fx.errors import StateError

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class LeafWork:
    """What a call takes, forward.

    Attributes:
        flops: of products, by torch's formulas.
        traffic_bytes: that other ops read and write, views left out.
        num_ops: how many ops torch is asked for.
    """

    flops: float = 0.0
    traffic_bytes: float = 0.0
    num_ops: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(StateError, "work of a leaf", **dict(zip(_NAMES, _VALUES(self), strict=True)))


_NAMES = tuple(one.name for one in fields(LeafWork))
_VALUES = attrgetter(*_NAMES)


class CountWork(TorchDispatchMode):
    """Counts the work of the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._totals = dict.fromkeys(_NAMES, 0.0)

    @property
    def work(self) -> LeafWork:
        """Return what has been counted."""
        return LeafWork(**self._totals)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and count it."""
        given: Mapping[str, Any] = kwargs or {}
        made = func(*args, **given)
        flops = _flops(func, args, given, made)
        self._totals["num_ops"] += 1
        if flops is not None:
            self._totals["flops"] += flops
        elif not has_schema(func) or not _makes_views(func):
            self._totals["traffic_bytes"] += _num_bytes((args, given, made))
        return made


def _flops(op: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> int | None:
    """Return the FLOPs of an op by torch's formula; None where there is none, or none for these shapes."""
    formula = flop_registry.get(getattr(op, "overloadpacket", op))
    try:
        return None if formula is None else int(formula(*args, **kwargs, out_val=made))
    except AssertionError:  # by which formulas refuse shapes
        return None


def _makes_views(op: Any) -> bool:
    """Tell whether an op returns (a part of) what it is given, and writes nothing there."""
    aliases = [result.alias_info for result in schema(op).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _num_bytes(values: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tree_leaves(values) if isinstance(one, Tensor))


@dataclass(frozen=True, slots=True)
class _Curve:
    """What calls take in which one size differs.

    Attributes:
        place: of that size: the number of a tensor that is given, and a dim.
        points: sizes, each once, and the work of a call; the example's first.
    """

    place: tuple[int, int]
    points: tuple[tuple[int, LeafWork], ...]

    def times(self, name: str, size: int) -> float:
        """Return how many times as much a call takes of one kind as the example's, if the size is this."""
        pairs = [(one, float(getattr(work, name))) for one, work in self.points]
        example = pairs[0][1]
        if not example or size == pairs[0][0]:
            return 1.0
        return _polynomial(pairs, size) / example


def _polynomial(pairs: Sequence[tuple[int, float]], at: int) -> float:
    """Return the value of the parabola through three points, if it has no term below 0; else of a line."""
    if len(pairs) > 2:
        (x, y), (x1, y1), (x2, y2) = pairs[:3]
        near, far = (y1 - y) / (x1 - x), (y2 - y1) / (x2 - x1)
        square = (far - near) / (x2 - x)
        linear = near - square * (x + x1)
        fixed = y - (linear + square * x) * x
        if min(fixed, linear, square) >= -ROUNDING * y:
            return max(0.0, fixed + (linear + square * at) * at)
    (x, y), (x1, y1) = pairs[0], max(pairs[1:])
    return max(0.0, y + max(0.0, (y1 - y) / (x1 - x)) * (at - x))


ROUNDING = 1e-9
"""By how much, in times of the example's, a term of a polynomial may be below 0."""


@dataclass(frozen=True, slots=True)
class WorkBySize:
    """What a call of a leaf takes, forward, by the sizes of what it is given; sizes that change together multiply."""

    example: LeafWork = field(default_factory=LeafWork)
    curves: tuple[_Curve, ...] = ()

    @classmethod
    def of(cls, calls: Iterable[tuple[Shapes, LeafWork]]) -> WorkBySize:
        """Return it by the shapes and the work of some calls, the example's first."""
        (shapes, example), *others = calls
        found: dict[tuple[int, int], dict[int, LeafWork]] = {}
        for other, work in others:
            changed = list(_changed(shapes, other))
            if changed:
                (tensor, dim) = changed[0]
                points = found.setdefault((tensor, dim), {shapes[tensor][dim]: example})
                points.setdefault(other[tensor][dim], work)
        return cls(example, tuple(_Curve(place, tuple(points.items())) for place, points in found.items()))

    def at(self, shapes: Shapes) -> LeafWork:
        """Return what a call takes that is given tensors of these shapes."""
        return LeafWork(*(self._at(name, shapes) for name in _NAMES))

    def _at(self, name: str, shapes: Shapes) -> float:
        sizes = [(curve, shapes[curve.place[0]][curve.place[1]]) for curve in self.curves]
        example: float = getattr(self.example, name)
        return example * math.prod(curve.times(name, size) for curve, size in sizes)


NO_WORK = WorkBySize()


def _changed(shapes: Shapes, others: Shapes) -> Iterator[tuple[int, int]]:
    """Yield the dims of tensors that have other sizes."""
    for tensor, (one, other) in enumerate(zip(shapes, others, strict=True)):
        yield from ((tensor, dim) for dim, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
