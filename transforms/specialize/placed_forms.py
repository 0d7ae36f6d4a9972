"""Ops that go by position along a factor, written for a device that has a part of it from some place on.

A rule names such factors `placed` (see `hetu_fx.deduction.rules.rule`). This table has the forms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import Size, bound, callee, operand, overload
from hetu_fx.transforms.specialize.localize import computed

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Placed:
    """A call of an op on a part of a factor.

    Fields:
        node: the op in the logical graph.
        args, kwargs: its arguments on this device, tensors as local nodes.
        is_first: whether no part comes before this device's.
        start, size: where the part begins in the whole factor, and how long it is.
        emit: adds a call of an op to the device graph.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_first: bool
    start: Size
    size: Size
    emit: Callable[..., fx.Node]

    @property
    def given(self) -> dict[str, Any]:
        """Return all arguments by name, defaults filled in."""
        return bound(overload(self.node), self.args, self.kwargs)

    @property
    def stop(self) -> Size:
        """Return where the part ends in the whole factor."""
        if isinstance(self.size, fx.Node):
            return computed(operator.add, self.size, self.start)
        assert isinstance(self.start, int), "a part of known size begins at a known place"
        return self.start + self.size


def _causal_attention(part: Placed) -> fx.Node:
    """Attend with a part of the queries: keys after its last are left out, the mask has its rows alone."""
    given, stop = part.given, part.stop
    for name in ("key", "value"):
        given[name] = part.emit(aten.slice.Tensor, given[name], -2, 0, stop)
    if not part.is_first:
        keys = part.emit(aten.sym_size.int, given["key"], len(meta.shape(operand(part.node))) - 2)
        meta.set_value(keys, meta.hint(meta.shape(operand(part.node, 1))[-2]))
        given["attn_mask"], given["is_causal"] = _rows_of_triangle(part, keys, stop), False
    tensors = (given.pop(name) for name in ("query", "key", "value"))
    return part.emit(callee(part.node), *tensors, **given)


def _rows_of_triangle(part: Placed, keys: fx.Node, stop: Size) -> fx.Node:
    """Write which keys come no later than each query of the part."""
    device = meta.value(operand(part.node)).device
    rows = part.emit(aten.arange.start, part.start, stop, device=device)
    columns = part.emit(aten.arange.default, keys, device=device)
    return part.emit(aten.le.Tensor, columns, part.emit(aten.unsqueeze.default, rows, 1))


FORMS: Mapping[str, Callable[[Placed], fx.Node]] = {
    "aten.scaled_dot_product_attention.default": _causal_attention,
}


def placed_form(node: fx.Node) -> Callable[[Placed], fx.Node]:
    """Return the form of the op that a node calls, whose rule names a placed factor."""
    return FORMS[str(node.target)]
