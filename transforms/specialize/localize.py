"""Write the arguments of one op for one device: local operands, and literal sizes in the device's numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass, OpFactors, SizeArg
from hetu_fx.deduction.rules.call import Path, entry_at, holder_of
from hetu_fx.graph.calls import Size
from hetu_fx.graph.edit import computed

SizeOf = Callable[[FactorClass], Size]


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
    args, kwargs = _thawed(node.args), _thawed(dict(node.kwargs))
    call = {"args": args, "kwargs": kwargs}
    for operand, local in zip(op.operands, operands, strict=True):
        _set(call, operand.path, local)
    placed = set(operands)
    for size in op.size_args:
        if not cut:
            break
        told = _told(entry_at(call, size.path), size, cut, size_of, others)
        if told is not None:
            _set(call, size.path, told)
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
    if isinstance(given, fx.Node) and all(cls.size is not None for cls in mine):
        return _scaled(others[given], mine, size_of) if mine else None
    may_be_empty = given == -1 and not all(isinstance(part := size_of(cls), int) and part > 0 for cls in cut)
    is_cut = isinstance(given, fx.Node) and bool(mine)
    is_known = known and isinstance(given, int)
    return product([size_of(cls) for cls in size.classes]) if is_cut or is_known or may_be_empty else None


def product(sizes: Sequence[Size]) -> Size:
    """Return a product of sizes; emits what only the run tells."""
    whole: Size = math.prod(size for size in sizes if isinstance(size, int))
    for size in sizes:
        if isinstance(size, fx.Node):
            whole = computed(operator.mul, size, whole)
    return whole


def _scaled(size: fx.Node, cut: Iterable[FactorClass], size_of: SizeOf) -> fx.Node:
    """Emit a device's part of a size that the graph computes: with what is cut, it counts rows or positions."""
    for factor in cut:
        assert factor.size is not None, "what only the run tells is computed from its own factors"
        rest = size.graph.call_function(operator.floordiv, (size, factor.size))
        size = size.graph.call_function(operator.mul, (rest, size_of(factor)))
    return size


def _thawed(value: Any) -> Any:
    """Copy nested arguments into lists and dicts that can be changed."""
    if isinstance(value, (list, tuple)):
        return [_thawed(item) for item in value]
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in value.items()}
    return value


def _set(call: dict[str, Any], path: Path, value: Any) -> None:
    holder, key = holder_of(call, path)
    holder[key] = value
