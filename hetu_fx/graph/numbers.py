"""Python values in what a forward returns, which a graph cannot make anew in every step: kept right, or named.

A number that is read from a tensor (`loss.item()`) becomes an output like the tensor, and a number again where it is
handed out. What follows from sizes, or differs between two traces (a clock), says so when it is used.
"""

from __future__ import annotations

import datetime
import pickle
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor, fx

from hetu_fx.graph import edit, meta
from hetu_fx.graph.containers import (
    NOT_ASKED,
    PLAIN_TYPES,
    Constant,
    Leaf,
    NumberSlot,
    Opaque,
    TensorSlot,
    Tree,
    WithheldNumber,
    map_leaves,
    walk,
)

aten = torch.ops.aten

_KINDS: Mapping[type, torch.dtype] = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64}
_READS = (aten.item.default, aten._local_scalar_dense.default)
_UNBACKED = ("u", "zuf")  # how names of symbols begin that stand for what was read from tensors
_SECONDS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
CLOCKS = (*_SECONDS, *(f"{name}_ns" for name in _SECONDS))
"""Functions of `time`."""
_LATER = 12345.678  # seconds

OF_SIZES = "it follows from the sizes of a batch that is spread over devices\nhint: work it out outside of the forward"
OF_TENSORS = (
    "it is not made of one tensor that the forward reads a number from\nhint: return tensors, and make a number of "
    "them outside of the forward"
)
UNSTEADY = (
    "it is another one in every call, and a captured graph would return the first for ever\nhint: work it out outside "
    "of the forward"
)


def with_numbers(tree: Tree, tensors: Mapping[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
    """Return an output that has slots for numbers read from tensors, and what fills all its slots, in order."""
    made = map_leaves(tree, _as_slot)
    read = {leaf.name: leaf.value for leaf in walk(tree) if _is_number(leaf) and _is_read(leaf.value)}
    numbers = {name: torch.scalar_tensor(value, dtype=_KINDS[type(value)]) for name, value in read.items()}
    filled = {**tensors, **numbers}
    return made, {leaf.name: filled[leaf.name] for leaf in walk(made) if isinstance(leaf, TensorSlot)}


def _is_number(leaf: Any) -> TypeGuard[Opaque]:
    return isinstance(leaf, Opaque) and isinstance(leaf.value, (*_KINDS, torch.SymBool))


def _is_read(number: Any) -> bool:
    """Tell whether a number was read from tensors: its symbols stand for no sizes."""
    symbols = number.node.expr.free_symbols if type(number) in _KINDS else ()
    return bool(symbols) and all(str(symbol).startswith(_UNBACKED) for symbol in symbols)


def _as_slot(leaf: Leaf) -> Tree:
    if not _is_number(leaf):
        return leaf
    if _is_read(leaf.value):
        return NumberSlot(leaf.name, leaf.name)
    why = OF_TENSORS if isinstance(leaf.value, torch.SymBool) else OF_SIZES
    return Constant(leaf.name, WithheldNumber(leaf.name, why))


def settled_numbers(flat: fx.Graph, tree: Tree, *, wanted: bool) -> Tree:
    """Give a graph the tensors as outputs that numbers are read from, in the place of the numbers.

    Returns the structure. What cannot be so, or is not `wanted`, says that in it when it is used, and the graph has no
    output for it any more.
    """
    output = flat.output_node()
    slots = [leaf for leaf in walk(tree) if isinstance(leaf, TensorSlot)]
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    settled = dict[str, Tree]()
    for place, slot in enumerate(slots):
        if isinstance(slot, NumberSlot):
            read = _read_for(values[place].args[0], flat) if wanted else None
            why = OF_TENSORS if wanted else NOT_ASKED
            values[place] = None if read is None else edit.insert(output, aten.detach.default, read[0])
            settled[slot.name] = (
                Constant(slot.name, WithheldNumber(slot.name, why)) if read is None else _named(slot, read)
            )
    output.args = (tuple(value for value in values if value is not None),)
    return map_leaves(tree, lambda leaf: settled[leaf.name] if isinstance(leaf, NumberSlot) else leaf)


def _named(slot: NumberSlot, read: tuple[fx.Node, Any]) -> NumberSlot:
    """Return the slot of a number; its tensor has another name where it is not the number itself."""
    _, expression = read
    return slot if expression is None else NumberSlot(f"{slot.name} (read)", slot.shown, expression)


def _read_for(number: Any, flat: fx.Graph) -> tuple[fx.Node, Any] | None:
    """Return the tensor that a number is read from, and what it is of that (None: itself); None where there is none."""
    if not isinstance(number, fx.Node):
        return None
    expression = meta.expression(meta.value(number))
    reads = [node for node in flat.nodes if node.target in _READS]
    found = [node for node in reads if {meta.expression(meta.value(node))} == expression.free_symbols]
    if not found:
        return None
    is_itself = meta.expression(meta.value(found[0])) == expression
    return found[0].all_input_nodes[0], None if is_itself else expression


def plain_values(tree: Tree) -> dict[str, Any]:
    """Return the plain values in an output, by name; None aside."""
    leaves = [leaf for leaf in walk(tree) if isinstance(leaf, Constant) and isinstance(leaf.value, PLAIN_TYPES)]
    return {leaf.name: leaf.value for leaf in leaves if leaf.value is not None}


def steady(tree: Tree, again: Tree | None) -> Tree:
    """Return an output in which plain values that another trace has made otherwise say so when they are used.

    All of them do where there is no other trace (None).
    """
    other = {} if again is None else plain_values(again)
    unsteady = {name for name, value in plain_values(tree).items() if repr(other.get(name)) != repr(value)}

    def named(leaf: Leaf) -> Tree:
        is_unsteady = isinstance(leaf, Constant) and leaf.name in unsteady
        return Constant(leaf.name, WithheldNumber(leaf.name, UNSTEADY)) if is_unsteady else leaf

    return map_leaves(tree, named)


class _LaterDatetime(datetime.datetime):
    """Shows a time of which year, month, day, hour, and the rest differ."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return super().now(tz) + datetime.timedelta(days=402, seconds=_LATER)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


def _later_clock(clock: Any) -> Any:
    if clock is datetime.datetime:
        return _LaterDatetime
    factor = 10**9 if clock.__name__.endswith("_ns") else 1
    return lambda: clock() * 3 + type(clock())(_LATER * factor)


@contextmanager
def later(imported: Iterable[tuple[dict[str, Any], str]] = ()) -> Iterator[None]:
    """Let clocks show a later time, so that what is made of them differs even where it is rounded.

    Args:
        imported: where else they are: globals or a module's, and under which names.
    """
    places = [*((vars(time), name) for name in CLOCKS), *imported]
    with ExitStack() as stack:
        for space, name in places:
            stack.enter_context(mock.patch.dict(space, {name: _later_clock(space[name])}))
        yield


def random_states() -> dict[str, bytes]:
    """Return how far Python's generators of random numbers are, by the modules that have them."""
    states = {"random": pickle.dumps(random.getstate())}
    if "numpy.random" in sys.modules:
        states["numpy.random"] = pickle.dumps(sys.modules["numpy.random"].get_state())
    return states
