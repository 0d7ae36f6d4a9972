"""What ops do to tensors whose elements follow from their position alone: a reader for each op, in four tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments
from hetu_fx.graph.positions import FALSE, TRUE, Affine, AtMostZero, Known, Positional, PositionedCall, mapped

aten = torch.ops.aten


def _with_slopes(value: Positional | None, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Positional | None:
    """Rearrange the slopes of a value or of its bound."""
    return mapped(value, lambda affine: Affine(affine.constant, change(affine.slopes)))


def _arange(call: PositionedCall) -> Positional | None:
    given = arguments(call.node)
    start, step = given.get("start", 0), given.get("step", 1)
    exact = isinstance(start, int) and isinstance(step, int) and call.is_integral
    return Affine(start, (step,)) if exact else None


def _filled(fill: Callable[[PositionedCall], object]) -> Callable[[PositionedCall], Positional | None]:
    def read(call: PositionedCall) -> Positional | None:
        number = fill(call)
        if not isinstance(number, (bool, int)):
            return None
        if meta.dtype(call.node) is torch.bool:
            return TRUE if number else FALSE
        return Affine(int(number)) if call.is_integral else None

    return read


def _same(call: PositionedCall) -> Positional | None:
    return call.value_of(call.node.args[0])


def _cast(call: PositionedCall) -> Positional | None:
    source = call.node.args[0]
    assert isinstance(source, fx.Node)
    keeps_kind = (meta.dtype(source) is torch.bool) == (meta.dtype(call.node) is torch.bool)
    return call.value_of(source) if keeps_kind and call.is_integral else None


def _unsqueeze(call: PositionedCall) -> Positional | None:
    dim = call.given("dim") % (call.ndim + 1)
    return _with_slopes(call.value("self"), lambda slopes: (*slopes[:dim], 0, *slopes[dim:]))


def _transpose(call: PositionedCall) -> Positional | None:
    order = list(range(call.ndim))
    a, b = call.given("dim0"), call.given("dim1")
    order[a], order[b] = order[b], order[a]
    return _with_slopes(call.value("self"), lambda slopes: tuple(slopes[dim] for dim in order))


def _slice(call: PositionedCall) -> Positional | None:
    start, step = call.given("start") or 0, call.given("step")
    if not isinstance(start, int) or not isinstance(step, int) or start < 0:
        return None
    dim = call.given("dim") % call.ndim

    def move(value: Affine) -> Affine:
        slope = value.slopes[dim]
        slopes = (*value.slopes[:dim], slope * step, *value.slopes[dim + 1 :])
        return Affine(value.constant + slope * start, slopes)

    return mapped(call.value("self"), move)


def _sum(sign: int) -> Callable[[PositionedCall], Positional | None]:
    def read(call: PositionedCall) -> Positional | None:
        a, b, factor = call.affine("self"), call.affine("other"), call.given("alpha")
        if a is None or b is None or not isinstance(factor, int) or not call.is_integral:
            return None
        return a.plus(b, sign * factor)

    return read


def _compared(first_less: bool, strictly: bool) -> Callable[[PositionedCall], Positional | None]:
    """Read a < b (or with `first_less` false, a > b) as a bound at most zero; integers make < of <=."""

    def read(call: PositionedCall) -> Positional | None:
        a, b = call.affine("self"), call.affine("other")
        if a is None or b is None:
            return None
        small, large = (a, b) if first_less else (b, a)
        return AtMostZero(small.plus(large, -1).plus(Affine(int(strictly))))

    return read


def _equality(wanted: bool) -> Callable[[PositionedCall], Positional | None]:
    """Read == (or !=) where the two differ by the same number everywhere."""

    def read(call: PositionedCall) -> Positional | None:
        a, b = call.affine("self"), call.affine("other")
        difference = None if a is None or b is None else a.plus(b, -1)
        if difference is None or not difference.is_constant:
            return None
        return TRUE if (difference.constant == 0) == wanted else FALSE

    return read


def _joined(neutral: AtMostZero) -> Callable[[PositionedCall], Positional | None]:
    """Read `and` (neutral: TRUE) or `or` (neutral: FALSE)."""

    def read(call: PositionedCall) -> Positional | None:
        a, b = call.value("self"), call.value("other")
        truths = [value.always if isinstance(value, AtMostZero) else None for value in (a, b)]
        if neutral.always in truths:
            return b if truths[0] == neutral.always else a
        if (not neutral.always) in truths:
            return FALSE if neutral.always else TRUE
        return a if a == b else None

    return read


def _not(call: PositionedCall) -> Positional | None:
    value = call.value("self")
    return AtMostZero(Affine(1).plus(value.bound, -1)) if isinstance(value, AtMostZero) else None


def _diff(call: PositionedCall) -> Positional | None:
    """Read differences along a dim, the first against `prepend`: the slope, where they all are."""
    value, before = call.affine("self"), call.affine("prepend")
    if value is None or before is None or call.given("n") != 1 or call.given("append") is not None:
        return None
    dim = call.given("dim") % call.ndim
    slope = value.slopes[dim]
    prepend = call.given("prepend")
    at_start = Affine(value.constant, (*value.slopes[:dim], 0, *value.slopes[dim + 1 :]))
    is_one = meta.shape(prepend)[dim] == 1
    return Affine(slope) if is_one and at_start.plus(before, -1) == _level(slope, call.ndim) else None


def _level(constant: int, ndim: int) -> Affine:
    return Affine(constant, (0,) * ndim)


def _cumsum(call: PositionedCall) -> Positional | None:
    value = call.value("self")
    is_zero = isinstance(value, AtMostZero) and value.always is False
    if isinstance(value, Affine):
        is_zero = value.is_constant and value.constant == 0
    return Affine(0) if is_zero and call.is_integral else None


def _index(call: PositionedCall) -> Positional | None:
    """Read x[i, j, ...] with an index for every dim, where all indices that matter are known and count from 0."""
    value, indices = call.affine("self"), call.given("indices")
    if value is None or len(indices) != call.ndim or any(index is None for index in indices):
        return None
    result = Affine(value.constant)
    for slope, index in zip(value.slopes, indices, strict=True):
        place = call.value_of(index)
        if slope and not (isinstance(place, Affine) and place.is_never_negative):
            return None
        if isinstance(place, Affine) and slope:
            result = result.plus(place, slope)
    return result


Reader = Callable[[PositionedCall], Positional | None]
FILLS: dict[Any, Reader] = {
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _filled(lambda call: 1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _filled(lambda call: 0)),
    **dict.fromkeys(
        (aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default),
        _filled(lambda call: arguments(call.node).get("fill_value", arguments(call.node).get("s"))),
    ),
}
MOVES: dict[Any, Reader] = {
    **dict.fromkeys((aten.expand.default, aten.contiguous.default, aten.clone.default, aten.alias.default), _same),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), _cast),
    aten.unsqueeze.default: _unsqueeze,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
}
ARITHMETIC: dict[Any, Reader] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1)),
    aten.diff.default: _diff,
    aten.cumsum.default: _cumsum,
}
LOGIC: dict[Any, Reader] = {
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _compared(first_less=True, strictly=False)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _compared(first_less=True, strictly=True)),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _compared(first_less=False, strictly=False)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _compared(first_less=False, strictly=True)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equality(wanted=True)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equality(wanted=False)),
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _joined(TRUE)),
    **dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default), _joined(FALSE)),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
}
READERS: dict[Any, Reader] = {**FILLS, **MOVES, **ARITHMETIC, **LOGIC}


def positional_values(graph: fx.Graph) -> Known:
    """Return what is known of every tensor whose elements follow from their positions alone."""
    known: dict[fx.Node, Positional] = {}
    for node in graph.nodes:
        reader = READERS.get(node.target) if node.op == "call_function" and meta.is_tensor(node) else None
        if reader is None:
            continue
        found = mapped(reader(PositionedCall(node, known)), partial(_flat_where_single, shape=meta.shape(node)))
        if found is not None:
            known[node] = found
    return known


def _flat_where_single(value: Affine, shape: tuple[meta.Size, ...]) -> Affine:
    """Drop the slopes of dims of size 1, where the only index is 0, and give every dim of `shape` one."""
    slopes = (0,) * (len(shape) - len(value.slopes)) + value.slopes
    kept = (0 if isinstance(size, int) and size == 1 else slope for slope, size in zip(slopes, shape, strict=True))
    return Affine(value.constant, tuple(kept))
