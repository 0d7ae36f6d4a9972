"""Captured programs of one model, by mode and by the form of the batch; captured when first needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetu_fx.base.torch_private import parameter_slots
from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph.bind import Batch, as_call, flatten_batch, input_tensors
from hetu_fx.graph.capture import ambient_autocasts, capture
from hetu_fx.graph.containers import Constant, Opaque, walk
from hetu_fx.program.program import Program, make_program

Forward = Callable[..., Any]


class Programs:
    """Finds or captures the program for a batch.

    `forward` is the model's own forward; batches are brought to its keyword form where its signature allows. It is what
    somebody has `replaced` that of the model's class with, if anybody has.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.forward: Forward = model.forward
        self.replaced: Forward | None = model.__dict__.get("forward")
        self.signature = inspect.signature(self.forward)
        self._parameters = tuple(model.parameters())
        self._programs: dict[str, Program] = {}

    @property
    def num_blocks(self) -> int:
        """Return the number of repeated blocks of the model."""
        return next(iter(self._programs.values())).graph.num_blocks

    @property
    def training(self) -> Program:
        """Return the first program that was captured in training mode; StateError if there is none."""
        for program in self._programs.values():
            if program.graph.training:
                return program
        raise StateError("the model has not been captured in training mode yet; run a training batch first")

    def first(self, batch: Batch, training: bool) -> Program:
        """Return the program for an example batch as the user gives it: by keyword, or positional as a tuple."""
        args, kwargs = as_call(batch)
        return self.find(batch_of(self.signature, args, kwargs), training)

    def find(self, batch: Batch, training: bool) -> Program:
        """Return the program for batches like this one; captures the model the first time."""
        key = self.form(batch, training)
        if key not in self._programs:
            self._programs[key] = self.trace(batch, training)
        return self._programs[key]

    def form(self, batch: Batch, training: bool) -> str:
        """Return what `form_of` does, and the precision of the parameters: `model.to(dtype)` changes it later."""
        dtypes = [_short(parameter.dtype) for parameter in self._parameters]
        return f"{form_of(batch, training)} parameters {' '.join(dtypes if len(set(dtypes)) > 1 else dtypes[:1])}"

    def trace(self, batch: Batch, training: bool) -> Program:
        """Capture the model for batches like this one, with this one's sizes as the example's."""
        frozen = frozenset(n for n, p in self.model.named_parameters() if not p.requires_grad)
        # Also before parameters are home tensors: export leaves weak references to what it traces, and a tensor that
        # has some cannot be swapped for its home tensor.
        with _plain_parameters(self.model), _own_forward(self.model, self.replaced):
            graph = capture(self.model, batch, loss_fn=self._loss_fn_for(batch, training), training=training)
        return make_program(graph, frozen)

    def _loss_fn_for(self, batch: Batch, training: bool) -> Callable[..., Any] | None:
        """Return the loss function; in evaluation, none for a batch without what it needs (labels)."""
        if training or self.loss_fn is None:
            return self.loss_fn
        args, kwargs = as_call(batch)
        try:
            inspect.signature(self.loss_fn).bind(None, *args, **kwargs)
        except TypeError:
            return None
        return self.loss_fn


def batch_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """Return a call's batch: by keyword, or positional where the forward of this signature takes *args.

    Raises:
        BatchError: the arguments do not fit the forward.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BatchError(f"the batch does not fit the model's forward: {error}") from error
    batch: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                return (*bound.args,)
            case inspect.Parameter.VAR_KEYWORD:
                batch.update(value)
            case _:
                batch[name] = value
    return {name: value for name, value in batch.items() if value is not None}


def example_size(example: Batch, programs: Programs, program: Program) -> tuple[int, int]:
    """Return the rows and the sequence length (0: none) of an example batch; the program was traced with other rows."""
    args, kwargs = as_call(example)
    tensors = input_tensors(program.graph, batch_of(programs.signature, args, kwargs))
    return program.num_rows(tensors), program.longest(tensors)


def form_of(batch: Batch, training: bool) -> str:
    """Return a text that is equal for batches that one captured program can run."""
    tree, tensors = flatten_batch(batch)
    parts = [f"{name}:{_short(t.dtype)}[{t.dim()}]" for name, t in sorted(tensors.items())]
    parts += sorted(f"{leaf.name}={leaf.value!r}" for leaf in walk(tree) if isinstance(leaf, Constant))
    parts += sorted(f"{leaf.name}:{leaf.type_name}" for leaf in walk(tree) if isinstance(leaf, Opaque))
    parts += [f"autocast {kind} {_short(dtype)}" for kind, dtype in ambient_autocasts()]
    parts += [f"default {_short(torch.get_default_dtype())}"]
    return ("training " if training else "evaluation ") + " ".join(parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _own_forward(model: nn.Module, replaced: Forward | None) -> Iterator[None]:
    """Let the model run its own forward for a while: its class's, or what somebody had `replaced` it with."""
    patched = model.__dict__.pop("forward", None)
    if replaced is not None:
        model.__dict__["forward"] = replaced
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
        if patched is not None:
            model.__dict__["forward"] = patched


@contextmanager
def _plain_parameters(model: nn.Module) -> Iterator[None]:
    """Put uninitialised whole parameters in the model's places: enough to capture it, never computed with.

    Their memory is not touched, so the operating system does not back it.
    """
    slots = _named_slots(model)
    homes = dict(model.named_parameters())
    try:
        for name, places in slots.items():
            home = homes[name]
            empty = torch.empty(tuple(home.shape), dtype=home.dtype, device=home.device)
            plain = nn.Parameter(empty, requires_grad=home.requires_grad)
            for module, key in places:
                parameter_slots(module)[key] = plain
        yield
    finally:
        for name, places in slots.items():
            for module, key in places:
                parameter_slots(module)[key] = homes[name]


def _named_slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return for every parameter, by its first name, all places where the model holds it (several if tied)."""
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    first: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in parameter_slots(module).items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            key = first.setdefault(id(parameter), full)
            place = (module, name)
            if place not in slots.setdefault(key, []):
                slots[key].append(place)
    return slots
