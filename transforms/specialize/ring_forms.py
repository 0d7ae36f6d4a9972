"""Ops that look across a factor of some operands, of which each device has a part that goes round the others.

A rule names such operands `travelling` (see `hetu_fx.deduction.rules.rule`). This table has the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hetu_fx.graph.calls import Size, bound, overload


@dataclass(frozen=True, eq=False)
class Circle:
    """A call of an op on a part of a factor, with parts of travelling operands.

    Fields:
        node: the op in the logical graph.
        args, kwargs: its arguments on this device, tensors as local nodes.
        devices: those that the parts go round.
        own: the part of the factor that each of them computes.
        parts: by travelling operand, the part of it that each of them has.
        fused: adds a call of a communication op by name, and gives its first result.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    devices: tuple[int, ...]
    own: Sequence[Size]
    parts: Mapping[int, Sequence[Size]]
    fused: Callable[..., fx.Node]


def attention(circle: Circle) -> fx.Node:
    """Attend with a part of the queries to keys and values as they come by; the mask has the rows of the part."""
    given = bound(overload(circle.node), circle.args, circle.kwargs)
    tensors = (given[name] for name in ("query", "key", "value", "attn_mask"))
    layout = list(circle.devices), list(circle.own), list(circle.parts[1])
    return circle.fused("ring_attention", *tensors, *layout, given["is_causal"], given["scale"])


FORMS: Mapping[str, Callable[[Circle], fx.Node]] = {"aten.scaled_dot_product_attention.default": attention}


def ring_form(node: fx.Node) -> Callable[[Circle], fx.Node]:
    """Return the form of the op that a node calls, whose rule names travelling operands."""
    return FORMS[str(node.target)]
