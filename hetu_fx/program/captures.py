"""Captured programs of one model, by mode and by the form of the batch; captured when first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from time import perf_counter
from types import MethodType
from typing import Any

from torch import nn

from hetu_fx.base.memory import Log
from hetu_fx.base.progress import telling
from hetu_fx.errors import BatchError, CaptureError, StateError
from hetu_fx.graph.bind import Batch, GivenBatch, LossCall, as_call, input_tensors
from hetu_fx.graph.capture import in_mode
from hetu_fx.graph.containers import passed_names
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims, find_row_dims
from hetu_fx.graph.tracing.autocasts import ambient_autocasts, casting, casting_on_host
from hetu_fx.program.batch import batch_form, batch_from_call, quick_batch_form
from hetu_fx.program.captured import (
    Captured,
    CaptureEvent,
    Form,
    KeptCaptures,
    Match,
    Recurring,
    Sizes,
    batch_sizes,
)
from hetu_fx.program.lazy import check_shapes
from hetu_fx.program.observed import check_global_hooks
from hetu_fx.program.program import AS_IT_STANDS, Bindings, Program
from hetu_fx.program.structure import Structure
from hetu_fx.program.tracer import Forward, Tracer
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides

_MOST_STRUCTURES = 8  # that are kept, for models that change to and fro
_log = logging.getLogger("hetu_fx.variants")


class Programs:
    """Finds or captures the program for a batch, for the model as it is now.

    `forward` is the model's own forward; batches are brought to its keyword form where its signature allows.
    `overrides` say how its ops are run. With `casts_on_host`, which jobs have whose ranks compute on several types of
    devices, torch.autocast casts what it casts on the host, wherever the model is. `row_dims` is what the user has said
    of the rows of inputs, `outputs` which of them are wanted beside the loss.

    Attributes:
        structure: of the model when a program was last asked for.
        tracer: captures it.
        observers: of its submodules, whose outputs are outputs of its programs.
        signature: of the forward, with what the loss takes beside.
        current: the program that was last asked for.
        events: the last captures, each with its reason, and how many there were.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        overrides: OpOverrides = AS_IT_STANDS,
        *,
        casts_on_host: bool = False,
        row_dims: AskedRowDims = NOTHING_ASKED,
        outputs: str = "auto",
    ) -> None:
        check_shapes(model)
        self.model, self.loss_fn = model, loss_fn
        self.tracer = Tracer(model, loss_fn, overrides, casts_on_host=casts_on_host, row_dims=row_dims, outputs=outputs)
        self.become(model.__dict__.get("forward"))
        self.structure = Structure(model)
        self.observers = self.tracer.observers
        self.current: Program | None = None
        self._latest: dict[bool, Captured] = {}
        self._last: dict[bool, tuple[Any, Structure, Match]] = {}  # of the latest, for a batch of tensors alone
        self.events: Log[CaptureEvent] = Log()
        self._structures = [self.structure]
        self._kept = KeptCaptures()
        self._recurring = Recurring()

    @property
    def replaced(self) -> Forward | None:
        """Return what is captured in the place of the forward of the model's class; None: that."""
        return self.tracer.replaced

    def become(self, replaced: Forward | None) -> None:
        """Capture this in the place of the model's forward from now on; None: its class's."""
        self.tracer.replaced = replaced
        self.forward: Forward = replaced or MethodType(type(self.model).forward, self.model)
        self.signature = LossCall(self.forward, self.loss_fn).signature

    def batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Return a call's batch; see `batch_from_call`."""
        return batch_from_call(self.signature, args, kwargs)

    @property
    def num_blocks(self) -> int:
        """Return the number of repeated blocks of the model."""
        assert self.current is not None, "the model has been captured"
        return self.current.graph.num_blocks

    @property
    def training(self) -> Program:
        """Return the program that was last asked for in training mode; StateError if there is none."""
        if True not in self._latest:
            raise StateError("the model has not been captured in training mode yet\nhint: run a training batch first")
        return self._latest[True].program

    def first(self, batch: Batch, training: bool) -> Program:
        """Return the program for an example batch as the user gives it: by keyword, or positional as a tuple."""
        args, kwargs = as_call(batch)
        given = GivenBatch.of(self.batch(args, kwargs))
        self.tracer.row_dims.check_names(given.tensors)
        return self.match(given, training).program

    def find(self, batch: Batch, training: bool) -> Program:
        """Return the program for batches like this one, which is whole; see `match`."""
        given = GivenBatch.of(batch)
        found = self.match(given, training)
        is_right = _takes(found.program, found.bindings, found.rows)
        return (found if is_right else self.match(given, training, found.rows)).program

    def match(self, given: GivenBatch, training: bool, rows: int | None = None) -> Match:
        """Return the program for a batch; captures the model the first time, and where it has changed.

        Programs are kept: where a model becomes again what it was, so does the program. A program that fixes sizes has
        one like it for every other size, and one that compares its rows another one for where that comes out otherwise.

        Args:
            given: the batch, as this rank has it.
            training: the mode that the model is to be in.
            rows: what the batch has over all ranks; None: not known yet.

        Raises:
            CaptureError: the model cannot be captured.
            BatchError: it cannot be for these sizes, but was for others.
        """
        if self.model.training is not training:
            with in_mode(self.model, training):
                return self.match(given, training, rows)
        with self._casts():
            return self._match(given, training, rows)

    def _casts(self) -> AbstractContextManager[None]:
        """Turn the autocast that is on into that of the host, where that casts."""
        parameter = next(self.model.parameters(), None) if self.tracer.casts_on_host else None
        return nullcontext() if parameter is None else casting_on_host(parameter.device)

    def _match(self, given: GivenBatch, training: bool, rows: int | None) -> Match:
        check_global_hooks()
        self._look()
        likeness = quick_batch_form(given), self.observers.names
        last = self._last.get(training)
        if last is not None and last[:2] == (likeness, self.structure) and self._latest[training].reads.hold():
            known = last[-1]
            if _takes(known.program, known.bindings, rows):
                return self._use(self._latest[training], replace(known, tensors=given.tensors), training)
        forms = dict[frozenset[str], str]()

        def form(passed: frozenset[str]) -> str:
            if passed not in forms:
                observed = (f"observed {name}" for name in self.observers.names)
                forms[passed] = " ".join([batch_form(given, training, passed), *observed])
            return forms[passed]

        known_or_misfit = self._known(form, given, rows)
        if isinstance(known_or_misfit, str):
            known_or_misfit = self._capture(form, given, training, rows, known_or_misfit)
        found, sizes = known_or_misfit
        signature = f"{found.form} state {self.structure.digest}"
        match = Match(found.program, given.tensors, *sizes, signature, given if given.others else None)
        self._last.pop(training, None)
        if not given.others:
            self._last[training] = likeness, self.structure, replace(match, tensors={})
        return self._use(found, match, training)

    def _use(self, found: Captured, match: Match, training: bool) -> Match:
        self._kept.use(found)
        self.current, self._latest[training] = found.program, found
        return match

    def holds(self, program: Program) -> bool:
        """Tell whether a program that was found before is that of the model as it is now."""
        self._look()
        return any(one.program is program and one.holds(self.structure) for one in self._kept)

    def source(self, batch: Batch, training: bool, like: Program) -> Graph:
        """Capture the model's own graph for batches like this one, as no rewrite has seen it; nothing is kept.

        It has the autocasts of a program that was found before.

        Raises:
            CaptureError: the model cannot be captured.
        """
        with in_mode(self.model, training), casting(self._of(like).autocasts):
            return self.tracer.source(batch, training)

    def name(self, program: Program) -> str:
        """Return a short text of a fixed length that tells programs apart, the same in other processes."""
        return f"{program.fingerprint} {self._of(program).structure.digest}"

    def facts(self, program: Program) -> Mapping[str, str]:
        """Return what a program depends on, for ranks that find theirs unlike."""
        return {**self.structure.facts, **self._of(program).reads.facts}

    def _of(self, program: Program) -> Captured:
        return next(one for one in chain(self._latest.values(), self._kept) if one.program is program)

    def _look(self) -> None:
        """Take in what has changed of the model's structure."""
        if self.structure.holds():
            return
        known = next((one for one in self._structures if one.holds()), None)
        self.structure = known or Structure(self.model)
        self._structures = [self.structure, *(one for one in self._structures if one is not known)][:_MOST_STRUCTURES]

    def _known(self, form: Form, given: GivenBatch, rows: int | None) -> tuple[Captured, Sizes] | str:
        """Return the program that runs a batch; else the size that keeps one that holds from being used ("": none)."""
        misfit = ""
        open_first = sorted(self._kept.of_form(form), key=lambda one: not one.program.graph.takes_any_rows)
        for one in open_first:  # a rank's own rows may be as many as a graph of just so many has
            if one.holds(self.structure):
                sizes = batch_sizes(one.program, given)
                if not isinstance(sizes, str) and _takes(one.program, sizes[1], rows):
                    return one, sizes
                compares = f"the forward compares the rows of a batch, which are {rows}"
                misfit = misfit or (sizes if isinstance(sizes, str) else compares)
        return misfit

    def _capture(
        self, form: Form, given: GivenBatch, training: bool, rows: int | None, misfit: str
    ) -> tuple[Captured, Sizes]:
        start, alike = perf_counter(), self._kept.of_form(form)
        why = (misfit,) if misfit else alike[0].changes(self.structure) if alike else ()
        try:
            with telling("capturing the model"):
                program, reads = self.tracer.trace(self._example(form, given, rows), training)
        except CaptureError as error:
            if misfit:  # the model itself does not take such a size, or cannot be captured once more
                raise BatchError(f"{misfit}\nit is not captured for this size, as: {error}") from error
            raise
        self._look()  # a forward may register hooks when it first runs
        passed = passed_names(program.graph.input_tree)
        found = Captured(form(passed), program, self.structure, reads, given.plain_facts(passed), ambient_autocasts())
        seconds = perf_counter() - start
        self.events.note(CaptureEvent(found.form, why, seconds))
        if why:
            _log.info("the model is captured again: %s", "; ".join(why))
        changed = why or self._other_constants(found)
        self._recurring.note([f"a size that the graph fixes: {misfit}"] if misfit else changed, seconds)
        sizes = batch_sizes(program, given)
        if isinstance(sizes, str):
            raise BatchError(sizes)
        if rows is not None:
            program.check_rows(sizes[1], rows)
        return found, sizes

    def _example(self, form: Form, given: GivenBatch, rows: int | None) -> Batch:
        """Return a batch to trace: as it was given, or of so many rows, by what an earlier program takes for rows."""
        if rows is None:
            return given.batch
        dims = next((one.program.row_dims for one in self._kept.of_form(form) if one.program.row_dims), None)
        return given.of_rows(dims or find_row_dims(given.tensors, self.tracer.row_dims), rows)

    def _other_constants(self, found: Captured) -> tuple[str, ...]:
        """Return how plain values differ from those of the batch before, each of which has a form of its own."""
        before = next((one.constants for one in self._kept), {})
        return tuple(
            f"{name}: {before[name]} -> {text}"
            for name, text in found.constants.items()
            if before.get(name, text) != text
        )


def _takes(program: Program, bindings: Bindings, rows: int | None) -> bool:
    return rows is None or program.takes_rows(bindings, rows)


def example_size(example: Batch, programs: Programs, program: Program) -> tuple[int, int]:
    """Return the rows and the sequence length (0: none) of an example batch; the program was traced with other rows."""
    args, kwargs = as_call(example)
    tensors = input_tensors(program.graph, programs.batch(args, kwargs))
    return program.num_rows(tensors), program.longest(tensors)
