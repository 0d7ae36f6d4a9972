"""What is known of elements that follow from their position alone: affine functions of the indices, bounds on them.

Export writes masks out as arithmetic on index ranges. Reading that arithmetic back as what it means needs no value of
any batch, and holds for every size. There is a reader for each op, of a `PositionedCall`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, operand

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Affine:
    """The integer constant + sum of slopes[d] * (index in dim d); a dim of size 1 has slope 0."""

    constant: int
    slopes: tuple[int, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal."""
        return not any(self.slopes)

    @property
    def is_never_negative(self) -> bool:
        """Whether no element is below zero, whatever the sizes."""
        return self.constant >= 0 and min(self.slopes, default=0) >= 0

    @property
    def is_never_positive(self) -> bool:
        """Whether no element is above zero, whatever the sizes."""
        return self.constant <= 0 and max(self.slopes, default=0) <= 0

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """Return self + times * other, with the dims of the two aligned from the right."""
        pairs = itertools.zip_longest(reversed(self.slopes), reversed(other.slopes), fillvalue=0)
        slopes = [a + times * b for a, b in pairs]
        return Affine(self.constant + times * other.constant, tuple(reversed(slopes)))


@dataclass(frozen=True, slots=True)
class AtMostZero:
    """Whether an affine function is at most zero, element by element."""

    bound: Affine

    @property
    def always(self) -> bool | None:
        """The truth of all elements, if it is the same for every position and size."""
        if self.bound.is_never_positive:
            return True
        return False if self.bound.plus(Affine(-1)).is_never_negative else None


Positional = Affine | AtMostZero
TRUE, FALSE = AtMostZero(Affine(0)), AtMostZero(Affine(1))


def _map_affine(value: Positional | None, change: Callable[[Affine], Affine]) -> Positional | None:
    """Change an affine value, or the bound of a truth value."""
    match value:
        case Affine():
            return change(value)
        case AtMostZero(bound):
            return AtMostZero(change(bound))
    return None


Movement = Callable[[Affine], Affine]
"""What becomes of a function of the indices of a tensor in one that has its elements elsewhere."""


def movement(node: fx.Node) -> Movement | None:
    """Return how an op moves the elements of its first operand; None where that is not known."""
    return MOVEMENTS[node.target](node) if node.target in MOVEMENTS else None


def _ndim(node: fx.Node) -> int:
    return len(meta.shape(operand(node)))


def _unmoved(node: fx.Node) -> Movement:
    return lambda value: value


def _unsqueezed(node: fx.Node) -> Movement:
    dim = argument(node, "dim") % (_ndim(node) + 1)
    return lambda value: Affine(value.constant, (*value.slopes[:dim], 0, *value.slopes[dim:]))


def _transposed(node: fx.Node) -> Movement:
    order = list(range(_ndim(node)))
    a, b = argument(node, "dim0"), argument(node, "dim1")
    order[a], order[b] = order[b], order[a]
    return lambda value: Affine(value.constant, tuple(value.slopes[dim] for dim in order))


def _sliced(node: fx.Node) -> Movement | None:
    start, step = argument(node, "start") or 0, argument(node, "step")
    if not isinstance(start, int) or not isinstance(step, int) or start < 0:
        return None
    dim = argument(node, "dim") % _ndim(node)

    def move(value: Affine) -> Affine:
        slope = value.slopes[dim]
        slopes = (*value.slopes[:dim], slope * step, *value.slopes[dim + 1 :])
        return Affine(value.constant + slope * start, slopes)

    return move


MOVEMENTS: Mapping[Any, Callable[[fx.Node], Movement | None]] = {
    **dict.fromkeys((aten.expand.default, aten.contiguous.default, aten.clone.default, aten.alias.default), _unmoved),
    aten.unsqueeze.default: _unsqueezed,
    aten.transpose.int: _transposed,
    aten.slice.Tensor: _sliced,
}
"""How ops move the elements of their first operand."""

Known = Mapping[fx.Node, Positional]


@dataclass(frozen=True, slots=True)
class PositionedCall:
    """A call and what is known of its operands."""

    node: fx.Node
    known: Known

    def given(self, name: str) -> Any:
        """Return an argument as the graph has it."""
        return arguments(self.node)[name]

    def value(self, name: str) -> Positional | None:
        """Return what an argument is, tensor or number, if that is known."""
        return self.value_of(self.given(name))

    def value_of(self, item: object) -> Positional | None:
        """Return what a node or a number is, if that is known."""
        match item:
            case bool():
                return TRUE if item else FALSE
            case int():
                return Affine(item)
            case fx.Node():
                return self.known.get(item)
        return None

    def affine(self, name: str) -> Affine | None:
        """Return an argument that is an affine integer."""
        value = self.value(name)
        return value if isinstance(value, Affine) else None

    @property
    def ndim(self) -> int:
        """The number of dims of the first argument."""
        return len(meta.shape(self.node.args[0]))  # type: ignore[arg-type]

    @property
    def is_integral(self) -> bool:
        """Whether the result holds integers, which arithmetic here is exact for."""
        return not carries_gradient(meta.dtype(self.node))


def _arange(call: PositionedCall) -> Positional | None:
    given = arguments(call.node)
    start, step = given.get("start", 0), given.get("step", 1)
    exact = isinstance(start, int) and isinstance(step, int) and call.is_integral
    return Affine(start, (step,)) if exact else None


def _filled(call: PositionedCall, number: object = None) -> Positional | None:
    """Read a tensor filled with a number, that which the call names if none is given."""
    given = arguments(call.node)
    found = given.get("fill_value", given.get("s")) if number is None else number
    if not isinstance(found, (bool, int)):
        return None
    if meta.dtype(call.node) is torch.bool:
        return TRUE if found else FALSE
    return Affine(int(found)) if call.is_integral else None


def _cast(call: PositionedCall) -> Positional | None:
    source = call.node.args[0]
    assert isinstance(source, fx.Node)
    keeps_kind = (meta.dtype(source) is torch.bool) == (meta.dtype(call.node) is torch.bool)
    return call.value_of(source) if keeps_kind and call.is_integral else None


def _moved(call: PositionedCall) -> Positional | None:
    change = movement(call.node)
    return None if change is None else _map_affine(call.value_of(call.node.args[0]), change)


def _sum(call: PositionedCall, sign: int) -> Positional | None:
    a, b, factor = call.affine("self"), call.affine("other"), call.given("alpha")
    if a is None or b is None or not isinstance(factor, int) or not call.is_integral:
        return None
    return a.plus(b, sign * factor)


def _compared(call: PositionedCall, *, first_less: bool, strictly: bool) -> Positional | None:
    """Read a < b (or with `first_less` false, a > b) as a bound at most zero; integers make < of <=."""
    a, b = call.affine("self"), call.affine("other")
    if a is None or b is None:
        return None
    small, large = (a, b) if first_less else (b, a)
    return AtMostZero(small.plus(large, -1).plus(Affine(int(strictly))))


def _equality(call: PositionedCall, *, wanted: bool) -> Positional | None:
    """Read == (or !=) where the two differ by the same number everywhere."""
    a, b = call.affine("self"), call.affine("other")
    difference = None if a is None or b is None else a.plus(b, -1)
    if difference is None or not difference.is_constant:
        return None
    return TRUE if (difference.constant == 0) == wanted else FALSE


def _joined(call: PositionedCall, *, neutral: bool) -> Positional | None:
    """Read `and` (to which true is neutral) or `or` (false)."""
    a, b = call.value("self"), call.value("other")
    truths = [value.always if isinstance(value, AtMostZero) else None for value in (a, b)]
    if neutral in truths:
        return b if truths[0] == neutral else a
    if (not neutral) in truths:
        return FALSE if neutral else TRUE
    return a if a == b else None


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
_ROWS: tuple[tuple[Reader, tuple[Any, ...]], ...] = (
    (partial(_filled, number=1), (aten.ones.default, aten.ones_like.default, aten.new_ones.default)),
    (partial(_filled, number=0), (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)),
    (_filled, (aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)),
    (_moved, tuple(MOVEMENTS)),
    (_cast, (aten.to.dtype, aten._to_copy.default)),
    (_index, (aten.index.Tensor,)),
    (_arange, (aten.arange.default, aten.arange.start, aten.arange.start_step)),
    (partial(_sum, sign=1), (aten.add.Tensor, aten.add.Scalar)),
    (partial(_sum, sign=-1), (aten.sub.Tensor, aten.sub.Scalar)),
    (_diff, (aten.diff.default,)),
    (_cumsum, (aten.cumsum.default,)),
    (partial(_compared, first_less=True, strictly=False), (aten.le.Tensor, aten.le.Scalar)),
    (partial(_compared, first_less=True, strictly=True), (aten.lt.Tensor, aten.lt.Scalar)),
    (partial(_compared, first_less=False, strictly=False), (aten.ge.Tensor, aten.ge.Scalar)),
    (partial(_compared, first_less=False, strictly=True), (aten.gt.Tensor, aten.gt.Scalar)),
    (partial(_equality, wanted=True), (aten.eq.Tensor, aten.eq.Scalar)),
    (partial(_equality, wanted=False), (aten.ne.Tensor, aten.ne.Scalar)),
    (partial(_joined, neutral=True), (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)),
    (partial(_joined, neutral=False), (aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default)),
    (_not, (aten.bitwise_not.default, aten.logical_not.default)),
)
READERS: dict[Any, Reader] = {op: reader for reader, ops in _ROWS for op in ops}


def positional_values(graph: fx.Graph) -> Known:
    """Return what is known of every tensor whose elements follow from their positions alone."""
    known: dict[fx.Node, Positional] = {}
    for node in graph.nodes:
        reader = READERS.get(node.target) if node.op == "call_function" and meta.is_tensor(node) else None
        if reader is None:
            continue
        found = _map_affine(reader(PositionedCall(node, known)), partial(align_affine, shape=meta.shape(node)))
        if found is not None:
            known[node] = found
    return known


def align_affine(value: Affine, shape: tuple[meta.Size, ...]) -> Affine:
    """Drop the slopes of dims of size 1, where the only index is 0, and give every dim of `shape` one."""
    slopes = (0,) * (len(shape) - len(value.slopes)) + value.slopes
    kept = (0 if isinstance(size, int) and size == 1 else slope for slope, size in zip(slopes, shape, strict=True))
    return Affine(value.constant, tuple(kept))
