"""The sizes that factor classes have in one device's graph, its part of each that is cut, and calls written with them.

Sizes are numbers, or are computed as the graph runs from the length of a value.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hetu_fx.deduction.factors.dual_roles import original
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap, OpFactors, SizeArg
from hetu_fx.deduction.rules.call import call_entry, mutable_copy, set_entry
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import Size
from hetu_fx.graph.edit import append_size
from hetu_fx.transforms.layouts.annotated_graph import TENSOR, StageLayout
from hetu_fx.transforms.layouts.states import WHOLE, AxisState

SizeOf = Callable[[FactorClass], Size]


@dataclass(eq=False)
class LocalSizes:
    """Knows the device's part of every class that its stage cuts, and the size of any other.

    Attributes:
        factors: the classes of the dims of the logical graph's values.
        layout: the stage, with the parts or shares of what it cuts.
        places: where the device is on each axis of the stage.
        states: how the values lie along each axis.
        values: the nodes so far that the device's graph has for them.
        emit: adds a call that belongs to a node of the logical graph.
    """

    factors: FactorMap
    layout: StageLayout
    places: tuple[int, ...]
    states: tuple[Mapping[fx.Node, AxisState], ...]
    values: Mapping[fx.Node, fx.Node]
    emit: Callable[..., fx.Node]
    _parts: dict[tuple[FactorClass, int], DimParts] = field(default_factory=dict)
    _read: dict[FactorClass, fx.Node] = field(default_factory=dict)

    def in_op(self, cut: Collection[FactorClass], segment: int = 0) -> SizeOf:
        """Return the sizes that classes have in an op that computes a part of those in `cut`, by a segment's ratios."""
        return lambda cls: self.part(cls, segment) if cls in cut else self.whole(cls)

    def axis(self, factor: FactorClass) -> int:
        """Return the axis that cuts a class."""
        return next((i for i, axis in enumerate(self.layout.axes) if factor in axis.sizes), TENSOR)

    def part(self, factor: FactorClass, segment: int = 0) -> Size:
        """Return how much the device has of a class that is cut."""
        return self.parts(factor, segment).sizes[self.places[self.axis(factor)]]

    def start(self, factor: FactorClass, segment: int = 0) -> Size:
        """Return where the device's part of a class begins."""
        return self.parts(factor, segment).starts[self.places[self.axis(factor)]]

    def parts(self, factor: FactorClass, segment: int = 0) -> DimParts:
        """Return the parts of a class; those of a symbolic length are computed where one is needed first."""
        if (factor, segment) not in self._parts:
            shares = self.layout.axes[self.axis(factor)].parts(factor, segment)
            is_open = factor.size is None
            made = DimParts.in_shares(self._read_off(factor), shares) if is_open else DimParts.of_sizes(shares)
            self._parts[factor, segment] = made
        return self._parts[factor, segment]

    def around(self, factor: FactorClass, classes: Sequence[FactorClass]) -> tuple[Size, Size]:
        """Return (outer, inner), the sizes before and after a class inside a dim of these classes."""
        at = classes.index(factor)
        outer, inner = (product([self.whole(cls) for cls in beside]) for beside in (classes[:at], classes[at + 1 :]))
        return outer, inner

    def whole(self, factor: FactorClass) -> Size:
        """Return the size of all of a class.

        Raises:
            DeductionError: only the run tells it, and no value has it whole.
        """
        return self._read_off(original(factor)) if factor.size is None else factor.size

    def _read_off(self, factor: FactorClass) -> fx.Node:
        if factor not in self._read:
            node, dim = self._having(factor)
            self._read[factor] = self.emit(node, torch.ops.aten.sym_size.int, self.values[node], dim)
            meta.set_value(self._read[factor], factor.hint)
        return self._read[factor]

    def _having(self, factor: FactorClass) -> tuple[fx.Node, int]:
        """Return a value so far that has a class whole, and the dim of it."""
        states = self.states[self.axis(factor)]
        for node in filter(meta.is_tensor, self.values):
            dims = self.factors.dims(node)
            if (factor,) in dims and states.get(node) == WHOLE:
                return node, dims.index((factor,))
        raise DeductionError(
            f"the plan cuts a dim of size {factor.text} where no value has it whole that its size could be read off"
            f"\nhint: use a plan that does not share the sequence over devices {list(self.layout.devices)}"
        )


@dataclass(frozen=True, slots=True)
class DimParts:
    """A split dim: its length, and where each device's part starts and how long it is."""

    length: Size
    starts: tuple[Size, ...]
    sizes: tuple[Size, ...]

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...]) -> DimParts:
        """Return parts that are known."""
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return cls(sum(sizes), tuple(starts), sizes)

    @classmethod
    def in_shares(cls, length: fx.Node, shares: Sequence[int]) -> DimParts:
        """Emit the parts of a length, as `proportional_sizes` cuts it."""
        whole = sum(shares)
        cuts = itertools.accumulate(shares[:-1])
        inner = [append_size(operator.floordiv, append_size(operator.mul, length, share), whole) for share in cuts]
        sizes = [append_size(operator.sub, stop, start) for start, stop in itertools.pairwise((*inner, length))]
        return cls(length, (0, *inner), (inner[0], *sizes))


def localized_call(
    node: fx.Node,
    op: OpFactors,
    operands: Sequence[fx.Node],
    others: Mapping[fx.Node, fx.Node],
    cut: Collection[FactorClass],
    size_of: SizeOf,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the local op.

    Args:
        node: the op in the logical graph.
        op: its factors.
        operands: the local tensors, one per operand of `op`.
        others: local nodes of everything else (sizes).
        cut: the classes that the op computes a part of.
        size_of: the size that a class has in the local op: the device's part of those in `cut`, all of any other.
    """
    args, kwargs = mutable_copy(node.args), mutable_copy(dict(node.kwargs))
    call = {"args": args, "kwargs": kwargs}
    for operand, local in zip(op.operands, operands, strict=True):
        set_entry(call, operand.path, local)
    placed = set(operands)
    for size in op.size_args:
        if not cut:
            break
        told = _told(call_entry(call, size.path), size, cut, size_of, others)
        if told is not None:
            set_entry(call, size.path, told)
            placed.update([told] if isinstance(told, fx.Node) else [])

    def place(argument: Any) -> Any:
        if isinstance(argument, fx.Node) and argument not in placed:
            return others[argument]
        return argument

    return tuple(fx.node.map_aggregate(args, place)), dict(fx.node.map_aggregate(kwargs, place))


def _told(
    given: Any, size: SizeArg, cut: Collection[FactorClass], size_of: SizeOf, others: Mapping[fx.Node, fx.Node]
) -> Size | None:
    """Return what a size is on this device, None where it stays as it is.

    A -1 is told where it can be, and where it must: it says nothing beside a part that is empty.
    """
    if len(size.classes) == 1 and size.classes[0] in cut:
        return size_of(size.classes[0])
    known = all(cls.size is not None for cls in size.classes)
    mine = [cls for cls in size.classes if cls in cut]
    if given != -1 and all(cls.size is not None for cls in mine):
        return _scaled(others.get(given, given), mine, size_of) if mine else None
    may_be_empty = given == -1 and not all(isinstance(part := size_of(cls), int) and part > 0 for cls in cut)
    is_told = bool(mine) if isinstance(given, fx.Node) else known
    return product([size_of(cls) for cls in size.classes]) if is_told or may_be_empty else None


def product(sizes: Sequence[Size]) -> Size:
    """Return a product of sizes; emits what only the run tells."""
    whole: Size = math.prod(size for size in sizes if isinstance(size, int))
    for size in sizes:
        if isinstance(size, fx.Node):
            whole = append_size(operator.mul, size, whole)
    return whole


def _scaled(size: Size, cut: Iterable[FactorClass], size_of: SizeOf) -> Size:
    """Return a device's part of a size: with what is cut, one that the graph computes counts rows or positions."""
    for factor in cut:
        assert factor.size is not None, "what only the run tells is computed from its own factors"
        if isinstance(size, fx.Node):
            rest = size.graph.call_function(operator.floordiv, (size, factor.size))
            size = size.graph.call_function(operator.mul, (rest, size_of(factor)))
        else:
            size = product([size // factor.size, size_of(factor)])
    return size
