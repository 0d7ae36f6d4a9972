"""Captured programs of one model, by mode and by the form of the batch; captured when first needed."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import nn

from hetu_fx.base.torch_private import BACKWARD_HOOKS, CALL, FORWARD_HOOKS, parameter_slots
from hetu_fx.errors import BatchError, CaptureError, StateError
from hetu_fx.graph.bind import Batch, as_call, flatten_batch, input_tensors
from hetu_fx.graph.capture import ambient_autocasts, capture, in_mode
from hetu_fx.graph.containers import Constant, Opaque, walk
from hetu_fx.program.access import Access, put
from hetu_fx.program.contents import PLAIN
from hetu_fx.program.hooks import check_global_hooks, check_hooks, hooks_must_change
from hetu_fx.program.not_kept import NotKept, is_of_the_trace
from hetu_fx.program.observed import Observers
from hetu_fx.program.program import Program, bind, make_program
from hetu_fx.program.reads import ABSENT, Read, Reads, shown
from hetu_fx.program.structure import Structure, differences
from hetu_fx.program.watched import Watch

_MOST_STRUCTURES = 8  # that are kept, for models that change to and fro
_log = logging.getLogger("hetu_fx.variants")

Forward = Callable[..., Any]


@dataclass(frozen=True)
class CaptureEvent:
    """A capture of the model.

    Attributes:
        form: of the batch: mode, inputs, and what surrounds the call.
        why: what has changed since the last capture for this form; empty for the first.
        seconds: that it took.
    """

    form: str
    why: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Captured:
    """A program, and what it depends on."""

    program: Program
    structure: Structure
    reads: Reads

    def holds(self, structure: Structure) -> bool:
        """Tell whether the model is what it was, down to what its forward has read."""
        same = self.structure is structure or self.structure.key == structure.key
        return same and self.reads.hold()

    def misfit(self, batch: Batch) -> str:
        """Say which size of a batch of this form the program does not take; empty if it takes all.

        Raises:
            BatchError: inputs have different numbers of rows, which no program takes.
        """
        tensors = input_tensors(self.program.graph, batch)
        self.program.num_rows(tensors)
        try:
            bind(self.program.inputs, tensors)
        except BatchError as error:
            return str(error)
        return ""

    def changes(self, structure: Structure) -> tuple[str, ...]:
        """Say what is unlike what it was."""
        found = differences(self.structure.facts, structure.facts)
        found += differences(self.reads.facts, self.reads.facts_now)
        return found or ("a module, a hook or an object was replaced by one like it",)


class Programs:
    """Finds or captures the program for a batch, for the model as it is now.

    `forward` is the model's own forward; batches are brought to its keyword form where its signature allows. It is what
    somebody has `replaced` that of the model's class with, if anybody has.

    Attributes:
        structure: of the model when a program was last asked for.
        observers: of its submodules, whose outputs are outputs of its programs.
        current: the program that was last asked for.
        events: the captures so far.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.become(model.__dict__.get("forward"))
        self.structure = Structure(model)
        self.observers = Observers(model)
        self.current: Program | None = None
        self._latest: dict[bool, Program] = {}
        self.events: list[CaptureEvent] = []
        self._structures = [self.structure]
        self._captured: dict[str, list[Captured]] = {}
        self._newest: list[Captured] = []
        self._lost: list[tuple[Access, Any]] = []

    def become(self, replaced: Forward | None) -> None:
        """Capture this in the place of the model's forward from now on; None: its class's."""
        self.replaced = replaced
        self.forward: Forward = replaced or MethodType(type(self.model).forward, self.model)
        self.signature = inspect.signature(self.forward)

    @property
    def num_blocks(self) -> int:
        """Return the number of repeated blocks of the model."""
        assert self.current is not None, "the model has been captured"
        return self.current.graph.num_blocks

    @property
    def training(self) -> Program:
        """Return the program that was last asked for in training mode; StateError if there is none."""
        if True not in self._latest:
            raise StateError("the model has not been captured in training mode yet; run a training batch first")
        return self._latest[True]

    def first(self, batch: Batch, training: bool) -> Program:
        """Return the program for an example batch as the user gives it: by keyword, or positional as a tuple."""
        args, kwargs = as_call(batch)
        return self.find(batch_of(self.signature, args, kwargs), training)

    def find(self, batch: Batch, training: bool) -> Program:
        """Return the program for batches like this one; captures the model the first time, and where it has changed.

        Programs are kept: where a model becomes again what it was, so does the program. A program that fixes sizes has
        one like it for every other size.

        Raises:
            CaptureError: the model cannot be captured.
            BatchError: it cannot be for these sizes, but was for others.
        """
        if self.model.training is not training:
            with in_mode(self.model, training):
                return self.find(batch, training)
        check_global_hooks()
        self._look()
        form = self._form(batch, training)
        kept = self._captured.setdefault(form, [])
        found = next((one for one in kept if one.holds(self.structure) and not one.misfit(batch)), None)
        if found is None:
            found = self._capture(batch, training, form, kept)
        elif found is not kept[0]:
            kept.remove(found)
            kept.insert(0, found)
        self.current = self._latest[training] = found.program
        return found.program

    def holds(self, program: Program) -> bool:
        """Tell whether a program that was found before is that of the model as it is now."""
        self._look()
        return self._of(program).holds(self.structure)

    def form(self, batch: Batch, training: bool) -> str:
        """Return a text that is equal on ranks whose batches are alike, and whose models consist of the same."""
        self._look()
        return f"{self._form(batch, training)} state {self.structure.digest}"

    def _form(self, batch: Batch, training: bool) -> str:
        return " ".join([form_of(batch, training), *(f"observed {name}" for name in self.observers.names)])

    def name(self, program: Program) -> str:
        """Return a short text of a fixed length that tells programs apart, the same in other processes."""
        return f"{program.fingerprint} {self._of(program).structure.digest}"

    def facts(self, program: Program) -> Mapping[str, str]:
        """Return what a program depends on, for ranks that find theirs unlike."""
        return {**self.structure.facts, **self._of(program).reads.facts}

    def _of(self, program: Program) -> Captured:
        return next(one for one in self._newest if one.program is program)

    def _look(self) -> None:
        """Take in what has changed of the model's structure."""
        if self.structure.holds():
            return
        known = next((one for one in self._structures if one.holds()), None)
        self.structure = known or Structure(self.model)
        self._structures = [self.structure, *(one for one in self._structures if one is not known)][:_MOST_STRUCTURES]

    def _capture(self, batch: Batch, training: bool, form: str, kept: list[Captured]) -> Captured:
        start = perf_counter()
        misfit = next((one.misfit(batch) for one in kept if one.holds(self.structure)), "")
        why = (misfit,) if misfit else kept[0].changes(self.structure) if kept else ()
        try:
            program, reads = self.trace(batch, training)
        except CaptureError as error:
            if misfit:  # the model itself does not take such a size
                raise BatchError(misfit) from error
            raise
        self._look()  # a forward may register hooks when it first runs
        found = Captured(program, self.structure, reads)
        kept.insert(0, found)
        self._newest.append(found)
        self.events.append(CaptureEvent(form, why, perf_counter() - start))
        if why:
            _log.info("the model is captured again: %s", "; ".join(why))
        return found

    def trace(self, batch: Batch, training: bool) -> tuple[Program, Reads]:
        """Capture the model for batches like this one, with this one's sizes as the example's; and what it has read."""
        check_hooks(self.model)
        program, watch = self._trace_once(batch, training)
        watch.surroundings.check()
        if watch.changed:
            program, watch = self._traced_again(batch, training, program, watch.changed)
        return program, watch.reads([Read("'forward' of the model", vars(self), "replaced")])

    def _traced_again(
        self, batch: Batch, training: bool, program: Program, changed: list[tuple[Access, Any]]
    ) -> tuple[Program, Watch]:
        """Trace a forward once more, as it has left itself: one that has only marked that it has run is the same.

        Raises:
            CaptureError: it is not, or leaves itself otherwise again.
        """
        told = "; ".join(f"{access.label}: {shown(access.copy)} -> {shown(left)}" for access, left in changed)
        if all(isinstance(left, PLAIN) and access.space is not None for access, left in changed):
            for access, left in changed:
                put(access.space or {}, access.name, left)
            again, watch = self._trace_once(batch, training)
            if not watch.changed and again.fingerprint == program.fingerprint:
                return again, watch
            for access, _ in changed:
                access.put_back()
        raise CaptureError(
            f"the forward keeps state in Python, which a captured graph cannot do: {told} (before and after a call); "
            f"keep it in a buffer (register_buffer), change it outside of the forward, or use "
            f'hetu_fx.auto_parallelize(..., capture="eager")'
        )

    def _trace_once(self, batch: Batch, training: bool) -> tuple[Program, Watch]:
        loss_fn = self._loss_fn_for(batch, training)
        watch = Watch(self.model, loss_fn)
        frozen = frozenset(n for n, p in self.model.named_parameters() if not p.requires_grad)
        # Also before parameters are home tensors: export leaves weak references to what it traces, and a tensor that
        # has some cannot be swapped for its home tensor.
        with (
            _plain_parameters(self.model),
            _called_as_its_own(self.model, self.replaced),
            hooks_must_change(self.model),
            self._without_what_is_lost(watch),
        ):
            graph = capture(self.model, batch, loss_fn=loss_fn, training=training, around=partial(self._around, watch))
        return make_program(graph, frozen), watch

    @contextmanager
    def _around(self, watch: Watch) -> Iterator[Mapping[str, Any]]:
        with watch.watching(), self.observers.collecting() as found:
            yield found

    @contextmanager
    def _without_what_is_lost(self, watch: Watch) -> Iterator[None]:
        """Let attributes be what they were before any capture; afterwards those that forwards set refuse to be used."""
        for access, value in self._lost:
            if access.space is not None and isinstance(access.now, NotKept):
                put(access.space, access.name, value)
        try:
            yield
        finally:
            for access, left in watch.written:
                assert access.space is not None, "only what has attributes of its own is written"
                kept = NotKept(access.label) if is_of_the_trace(left) else left
                put(access.space, access.name, kept)
                self._lost.append((access, access.before))

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
def _called_as_its_own(model: nn.Module, replaced: Forward | None) -> Iterator[None]:
    """Let the model run its own forward for a while: its class's, or what somebody had `replaced` it with.

    Without its hooks, which are called around every step anyway.
    """
    space = vars(model)
    before = {name: space.get(name, ABSENT) for name in ("forward", CALL, *FORWARD_HOOKS, *BACKWARD_HOOKS)}
    put(space, "forward", ABSENT if replaced is None else replaced)
    put(space, CALL, ABSENT)
    space.update({name: OrderedDict() for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS)})
    try:
        yield
    finally:
        for name, value in before.items():
            put(space, name, value)


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
