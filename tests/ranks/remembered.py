"""Lets equal models be captured once in a process: tests make the same small ones over and over.

A capture takes a second, the forward of such a model a hundredth of one. Where a model of the same structure has been
captured for a batch of the same sizes, the forward runs once as it is, watched for what it reads as it is in a capture.
If it reads what was read then, down to the values, the model has that program; what it depends on is its own.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hetu_fx.base.device_types import is_elsewhere
from hetu_fx.graph.bind import Batch, GivenBatch, as_call, flatten_batch
from hetu_fx.graph.capture import in_mode
from hetu_fx.graph.containers import unflatten
from hetu_fx.graph.example import make_example
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.row_dims import AskedRowDims, find_row_dims
from hetu_fx.graph.tracing.contents import PLAIN, Inside, RawMemory, frozen
from hetu_fx.graph.unread import UnreadValues
from hetu_fx.program import tracer
from hetu_fx.program.batch import batch_form
from hetu_fx.program.program import Program
from hetu_fx.program.structure import Structure
from hetu_fx.program.tracer import Tracer
from hetu_fx.program.watched import _is_config
from tests.ranks.capture_store import Identity, OnlyItselfError, Place, place_of, told

trace_once = Tracer._trace_once


@dataclass(frozen=True)
class Known:
    """What a capture has come to: the model's own graph, the program, and what its forward has read."""

    source: Graph
    program: Program
    read: Set[tuple[str, Any]]


_known: dict[Any, Known] = {}


def remembered_captures() -> AbstractContextManager[Any]:
    """Capture equal models once in this process, while this lasts."""
    return mock.patch.object(Tracer, "_trace_once", remembered)


def remembered(it: Tracer, batch: Batch, training: bool) -> Any:
    """Trace a model, unless one that is equal has been."""
    key = key_of(it, batch, training)
    if key is None:
        return trace_once(it, batch, training)
    if key in _known and (again := played(it, batch, training, _known[key])):
        return again
    with place_of(key) as place:
        if place is not None and (again := taken(it, batch, training, key, place)):
            return again
        found = trace_once(it, batch, training)
        # A graph with a leaf calls the very module that it was captured from.
        if not found.watch.changed and not found.source.leaf_calls:
            _known[key] = Known(found.source, found.program(it.overrides), read_by(found))
            has_program(found, _known[key].program)
            if place is not None:
                place.keep(found.source, _known[key].read)
        return found


def taken(it: Tracer, batch: Batch, training: bool, key: Any, place: Place) -> Any:
    """Return a trace that has what another process has captured; None if there is none, or that has read otherwise."""
    stored = place.take()
    if stored is None:
        return None
    found = traced_by_play(it, batch, training, stored.source)
    if found is None or not stored.read <= set(map(told_or_not, read_by(found))):
        return None
    _known[key] = Known(found.source, found.program(it.overrides), read_by(found))
    has_program(found, _known[key].program)
    return found


def has_program(found: Any, program: Program) -> None:
    """Let a trace have a program that has been made of it, or of one like it."""
    vars(found)["program"] = lambda overrides: program


def key_of(it: Tracer, batch: Batch, training: bool) -> Any:
    """Return what models that are captured alike have in common, besides what their forwards read; None: not known."""
    facts = Structure(it.model).facts
    given = GivenBatch.of(batch)
    if (
        it.replaced is not None
        or it.observers.names
        or given.objects
        or given.passable
        or any("hooks of" in what for what in facts)
    ):
        return None
    sizes = tuple((name, tuple(tensor.shape)) for name, tensor in given.tensors.items())
    if any(is_elsewhere(parameter.device) for parameter in it.model.parameters()):
        return None
    if any("forward" in vars(module) for module in it.model.modules() if module is not it.model):
        return None  # what that reads comes on top; the model's own is its class's in a capture
    asked = repr(it.row_dims), it.outputs
    return *facts.items(), sizes, batch_form(given, training), it.loss_fn, repr(it.overrides), *asked, Tensor.float


def played(it: Tracer, batch: Batch, training: bool, known: Known) -> Any:
    """Return a trace of the model that has the program of another one; None if the two have read other things."""
    found = traced_by_play(it, batch, training, known.source)
    if found is None or not known.read <= read_by(found):
        return None
    has_program(found, copy.copy(known.program))  # a model has one for each of its captures
    return found


def traced_by_play(it: Tracer, batch: Batch, training: bool, source: Graph) -> Any:
    """Return a trace in which the forward has run as it is, with a graph that there is; None if it keeps state."""
    try:
        with mock.patch.object(tracer, "capture", partial(play, source)):
            found = trace_once(it, batch, training)
    except Exception:  # parameters have no values in a capture, and a forward may check what it makes of them
        return None
    return None if found.watch.changed else found


def read_by(traced: Any) -> Set[tuple[str, Any]]:
    """Return what a forward has read: of what, and the values."""
    reads = traced.watch.reads([])
    return {(read.label, content(read.value)) for read in reads._reads}


def content(value: Any) -> Any:
    """Return what is equal for values for which one graph holds."""
    value = frozen(value)
    match value:
        case dict():
            return tuple((key, content(item)) for key, item in value.items())
        case list() | tuple() | deque():
            return type(value), *map(content, value)
        case set() | frozenset():
            return frozenset(map(content, value))
        case FunctionType():  # what is in its closure has been read too
            return value.__code__, content(value.__defaults__), content(value.__kwdefaults__)
        case MethodType():
            return content(value.__func__), content(value.__self__)
        case Tensor():
            return value.dtype, str(value.device), repr(value.tolist())
        case RawMemory():
            return value
        case Inside():
            return value.kind, content(value.content)
        case _ if isinstance(value, PLAIN):
            return type(value), repr(value)
        case _ if isinstance(value, nn.Module) or _is_config(value):  # so have their attributes
            return type(value)
    return value if isinstance(value, Hashable) else Identity(id(value))


def told_or_not(value: Any) -> str | None:
    """Return the text of a value, None if it has none."""
    try:
        return told(value)
    except OnlyItselfError:
        return None


def play(
    graph: Graph,
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: Any,
    training: bool,
    around: Any,
    device: Any,
    casts_on_host: bool,
    row_dims: AskedRowDims,
    numbers: bool,
    unread: UnreadValues,
) -> Graph:
    """Run the forward on an example, as a capture does, and give the graph that there is."""
    tree, tensors = flatten_batch(batch)
    example = make_example(tensors, model, graph.row_dims or find_row_dims(tensors, row_dims), keep_batch=False)
    args, kwargs = as_call(unflatten(tree, example.tensors))
    with in_mode(model, training), unwritten(model), torch.random.fork_rng(devices=[]), around():
        output = model(*args, **kwargs)
        if loss_fn is not None:
            loss_fn(output, *args, **kwargs)
    return graph


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Give buffers back what they had."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)
