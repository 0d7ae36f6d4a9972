"""Read the call that an op node makes: its op, its arguments by name, what it writes to, whose storage it shares."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hetu_fx.base.torch_private import OpOverload, argument_names, is_written, schema
from hetu_fx.graph import meta

aten = torch.ops.aten

_UNSET = (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided)
NEW_STORAGE = frozenset({aten.lift_fresh_copy.default, aten.clone.default, aten._to_copy.default})


def callee(node: fx.Node) -> Callable[..., Any]:
    """Return the function that an op node calls."""
    assert callable(node.target), "only call_function nodes are asked"
    return node.target


def evaluate_op(node: fx.Node, values: Mapping[fx.Node, Any], **instead: Any) -> Any:
    """Return what the function that an op node calls makes of the values of other nodes; `instead` of some keywords."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return callee(node)(*args, **{**kwargs, **{name: instead[name] for name in instead if name in kwargs}})


def overload(node: fx.Node) -> OpOverload[..., Any]:
    """Return the torch op that a node calls; only for nodes that call one."""
    assert isinstance(node.target, OpOverload)
    return node.target


def is_view(node: fx.Node) -> bool:
    """Tell whether the op returns (a part of) its argument: by its schema, without asking which op it is."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return any(result.alias_info is not None for result in schema(target).returns)


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
    return isinstance(node.target, OpOverload) and is_random_op(node.target)


def is_random_op(op: OpOverload[..., Any]) -> bool:
    """Tell whether an op draws from torch's generator: torch tags most, others can be given one."""
    tagged = torch.Tag.nondeterministic_seeded in op.tags
    return tagged or any(str(given.type) == "Optional[Generator]" for given in schema(op).arguments)


def is_unset(node: fx.Node) -> bool:
    """Tell whether a node's value is memory that nobody has written to."""
    return isinstance(node.target, OpOverload) and is_unset_op(node.target)


def is_unset_op(op: OpOverload[..., Any]) -> bool:
    """Tell whether what an op makes is memory that nobody has written to."""
    return op.overloadpacket in _UNSET


def draws(node: fx.Node) -> bool:
    """Tell whether a node draws from torch's generator; one that drops nothing, or not now, does not."""
    if not is_random(node):
        return False
    given = arguments(node)
    rate = next((given[name] for name in ("dropout_p", "dropout", "p") if name in given), True)
    return bool(rate) and given.get("train") is not False and given.get("training") is not False


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes to, by its schema."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    return [
        given
        for index, argument in enumerate(schema(node.target).arguments)
        if is_written(argument)
        for given in _as_nodes(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    ]


def functional_form(op: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return the op that gives as a new value what this one writes, in place or to out=; None if there is none.

    It takes the same by its schema. Names of overloads do not tell: `pow_.Scalar` takes a tensor and a number,
    `pow.Scalar` a number and a tensor.
    """
    namespace, _, name = schema(op).name.partition("::")
    plain = name.replace("__i", "__", 1) if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    wanted = _taken(given for given in schema(op).arguments if not given.is_out)
    overloads = () if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    functional = (one for one in overloads if not argument_names(one).written)
    return next((one for one in functional if _taken(schema(one).arguments) == wanted), None)


def _taken(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    """Return names and types of arguments; the first is called `self` in one form, and `input` in another."""
    return [(given.name if place else "", str(given.type)) for place, given in enumerate(arguments)]


def _as_nodes(argument: Any) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        yield from (item for item in argument if isinstance(item, fx.Node))


def viewed_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage the node's value shares, if any."""
    if node.op != "call_function":
        return None
    written = written_arguments(node)
    if written:
        return written[0]
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and viewed_argument(source) is None:
        return None  # a result of an op that returns several new tensors
    if node.target in NEW_STORAGE:  # their example values share the storage, the op does not
        return None
    storages = meta.storages(node)
    return next((arg for arg in node.all_input_nodes if storages & meta.storages(arg)), None)


Size = int | fx.Node
