"""Read the call that an op node makes: what it calls, and its arguments by the names of the op's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hetu_fx.base.torch_private import OpOverload, schema


def callee(node: fx.Node) -> Callable[..., Any]:
    """Return the function that an op node calls."""
    assert callable(node.target), "only call_function nodes are asked"
    return node.target


def overload(node: fx.Node) -> OpOverload[..., Any]:
    """Return the torch op that a node calls; only for nodes that call one."""
    assert isinstance(node.target, OpOverload)
    return node.target


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """Return an argument that is a node."""
    found = node.args[index]
    assert isinstance(found, fx.Node)
    return found


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a torch op by name, in the schema's order; those not given have their defaults."""
    return bound(overload(node), node.args, node.kwargs)


def bound(op: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, in the schema's order; those not given have their defaults."""
    return {
        entry.name: args[i] if i < len(args) else kwargs.get(entry.name, entry.default_value)
        for i, entry in enumerate(schema(op).arguments)
    }


def argument(node: fx.Node, name: str) -> Any:
    """Return one argument of a torch op by name; KeyError if the op has none of that name."""
    return arguments(node)[name]


def is_random(node: fx.Node) -> bool:
    """Tell whether a node calls an op that draws from torch's generator."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def draws(node: fx.Node) -> bool:
    """Tell whether a node draws from torch's generator; one that drops nothing, or not now, does not."""
    if not is_random(node):
        return False
    given = arguments(node)
    return bool(given.get("dropout_p", given.get("p", True))) and given.get("train") is not False


Size = int | fx.Node
