"""Write the arguments of one op for one device: local operands, and literal sizes in the device's numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from hetu_fx.deduction.call import Path
from hetu_fx.deduction.factors import FactorClass, OpFactors, SizeArg

Size = int | fx.Node
PartOf = Callable[[FactorClass], Size]


def localized_call(
    node: fx.Node,
    op: OpFactors,
    operands: Sequence[fx.Node],
    others: Mapping[fx.Node, fx.Node],
    factor: FactorClass | None,
    part: PartOf,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the local op.

    Args:
        node: the op in the logical graph.
        op: its factors.
        operands: the local tensors, one per operand of `op`.
        others: local nodes of everything else (sizes).
        factor: the class the op computes a part of, or None.
        part: the size of this device's part of a class.
    """
    args, kwargs = _thawed(node.args), _thawed(dict(node.kwargs))
    call = {"args": args, "kwargs": kwargs}
    for operand, local in zip(op.operands, operands, strict=True):
        _set(call, operand.path, local)
    placed = set(operands)
    for size in op.size_args:
        if factor is None:
            break
        told = _told(_get(call, size.path), size, factor, part, others)
        if told is not None:
            _set(call, size.path, told)
            placed.update([told] if isinstance(told, fx.Node) else [])

    def place(argument: Any) -> Any:
        if isinstance(argument, fx.Node) and argument not in placed:
            return others[argument]
        return argument

    return tuple(fx.node.map_aggregate(args, place)), dict(fx.node.map_aggregate(kwargs, place))


def argument_at(node: fx.Node, path: Path) -> Any:
    """Return what stands at a place of a call."""
    return _get({"args": node.args, "kwargs": node.kwargs}, path)


def _told(
    given: Any, size: SizeArg, factor: FactorClass, part: PartOf, others: Mapping[fx.Node, fx.Node]
) -> Size | None:
    """Return what a size is on this device, None where it stays as it is.

    A -1 is told where it can be: it says nothing beside a part that is empty.
    """
    if size.classes == (factor,):
        return part(factor)
    if isinstance(given, fx.Node):
        return _scaled(others[given], factor, part) if factor in size.classes else None
    known = isinstance(given, int) and all(cls.size is not None for cls in size.classes)
    return _local_size(size, factor, part) if known else None


def _local_size(size: SizeArg, factor: FactorClass, part: PartOf) -> Size:
    """Return the product of the local sizes, which are all known."""
    local = [part(cls) if cls == factor else cls.size for cls in size.classes]
    return math.prod(size for size in local if isinstance(size, int))


def _scaled(size: fx.Node, factor: FactorClass, part: PartOf) -> fx.Node:
    """Emit a device's part of a size that the graph computes: with the factor, it counts rows or positions."""
    assert factor.size is not None, "a factor that is split beside others has a fixed size"
    rest = size.graph.call_function(operator.floordiv, (size, factor.size))
    return size.graph.call_function(operator.mul, (rest, part(factor)))


def _thawed(value: Any) -> Any:
    """Copy nested arguments into lists and dicts that can be changed."""
    if isinstance(value, (list, tuple)):
        return [_thawed(item) for item in value]
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in value.items()}
    return value


def _holder(call: dict[str, Any], path: Path) -> tuple[Any, Any]:
    first, *rest = path
    holder, key = (call["args"], first) if isinstance(first, int) else (call["kwargs"], first)
    for step in rest:
        holder, key = holder[key], step
    return holder, key


def _get(call: dict[str, Any], path: Path) -> Any:
    holder, key = _holder(call, path)
    return holder[key]


def _set(call: dict[str, Any], path: Path, value: Any) -> None:
    holder, key = _holder(call, path)
    holder[key] = value
