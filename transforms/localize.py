"""Write the arguments of one op for one device: local operands, and literal sizes in the device's numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from hetu_fx.deduction.call import Path
from hetu_fx.deduction.factors import FactorClass, OpFactors, SizeArg

PartOf = Callable[[FactorClass], int]


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
    for size in op.size_args if factor is not None else ():
        given = _get(call, size.path)
        if factor not in size.classes:
            continue
        if _is_literal(given):
            _set(call, size.path, _local_size(size, factor, part))
        elif isinstance(given, fx.Node):
            placed.add(scaled := _scaled(others[given], factor, part))
            _set(call, size.path, scaled)

    def place(argument: Any) -> Any:
        if isinstance(argument, fx.Node) and argument not in placed:
            return others[argument]
        return argument

    return tuple(fx.node.map_aggregate(args, place)), dict(fx.node.map_aggregate(kwargs, place))


def _local_size(size: SizeArg, factor: FactorClass, part: PartOf) -> int:
    """Return the product of the local sizes; a literal size has no symbolic class in it."""
    result = 1
    for cls in size.classes:
        assert cls.size is not None, "a literal size is a product of literal sizes"
        result *= part(cls) if cls == factor else cls.size
    return result


def _scaled(size: fx.Node, factor: FactorClass, part: PartOf) -> fx.Node:
    """Emit a device's part of a size that the graph computes: with the factor, it counts rows or positions."""
    assert factor.size is not None, "a factor that is split has a fixed size"
    rest = size.graph.call_function(operator.floordiv, (size, factor.size))
    return size.graph.call_function(operator.mul, (rest, part(factor)))


def _is_literal(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


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
