"""Capture a model as one single-device graph, by torch.export on the whole forward, loss included."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from hetu_fx.base.device_types import is_elsewhere
from hetu_fx.base.memory import without_collections
from hetu_fx.base.patches import install_patches
from hetu_fx.base.torch_private import (
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    answering_guards,
    clear_caches_of_sizes,
    detect_fake_mode,
    drop_traced_inputs,
    size_guards,
    without_fake_tensor_cache,
)
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.assemble import Assembly, tied_buffers, written_back
from hetu_fx.graph.bind import Batch, LossCall, as_call, flatten_batch
from hetu_fx.graph.capture_failure import (
    NothingUnseen,
    RowCountError,
    explain_failure,
    inference_is_no_grad,
    is_caught_by_the_user,
    no_backward_is_lost,
    reason,
    refusing_counted_rows,
    watch_fixed_sizes,
)
from hetu_fx.graph.containers import Tree, flatten, passed_values, passing, unflatten
from hetu_fx.graph.example import Example, make_example
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.graph import OBSERVED, Graph, OutputKind
from hetu_fx.graph.leaves.trace import LeafWarning, Leaves
from hetu_fx.graph.neutral import PARAMETERS, OnHost, find_device, stand_in_device, stand_in_state
from hetu_fx.graph.numbers import later, plain_values, steady, with_numbers
from hetu_fx.graph.regions import casts
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims, RowDims, count_rows, find_row_dims
from hetu_fx.graph.shared_memory import overlapping
from hetu_fx.graph.tracing.autocasts import ambient_autocasts
from hetu_fx.graph.tracing.derivatives import Derivatives, DerivativeTaken, transforms_as_derivatives
from hetu_fx.graph.tracing.known_results import known_results, open_lengths, without_numbers
from hetu_fx.graph.tracing.raising_checks import ComparedRows, RaisingChecks
from hetu_fx.graph.tracing.read_values import KnownValues
from hetu_fx.graph.unread import UnreadValues

LossFn = Callable[..., torch.Tensor]
_ROWS = {True: Dim("batch", min=1), False: Dim.STATIC}
Around = Callable[[], AbstractContextManager[Mapping[str, Any]]]


def _nothing_more() -> AbstractContextManager[Mapping[str, Any]]:
    return contextlib.nullcontext({})


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    training: bool = True,
    around: Around = _nothing_more,
    device: torch.device | None = None,
    casts_on_host: bool = False,
    row_dims: AskedRowDims = NOTHING_ASKED,
    numbers: bool = True,
    fixed: bool = False,
    leaves: Collection[nn.Module] | None = None,
    unread: UnreadValues | None = None,
) -> Graph:
    """Capture the forward of `model` on batches like `batch` as a graph.

    Under torch.autocast, the casts that it makes are written into the graph. The model, the batch and the
    random state are not changed. The graph is the same wherever the model is (`graph.neutral`): it says "host" for the
    device that runs it. Where casts look at the device, or the model cannot be traced on the host, it says that device.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: keyword arguments (mapping) or positional ones (tuple). Values other than tensors are baked in.
        loss_fn: called as loss_fn(output, **batch) (or *batch), for a model that returns no loss.
        training: capture the model in training or in evaluation mode.
        around: entered each time that the forward is traced; gives a mapping, of which the tensors that it has when the
            forward has run are further outputs.
        device: where the model is, if what stands for its parameters now is not there; None: where it is.
        casts_on_host: torch.autocast casts what it casts on the host, wherever the model is.
        row_dims: which dims of inputs count the rows of the batch; of others their sizes, and the graph, tell.
        numbers: Python numbers that the forward reads from tensors are outputs too, beside a loss.
        fixed: the graph is for batches of just these sizes.
        leaves: modules that are called as they are, besides those that the user has named; None: they are found.
        unread: plain values of the batch in whose place the forward is given stand-ins; None: there are none.

    Raises:
        CaptureError: the model cannot be captured; names the line, with a hint.
        BatchError: `row_dims` does not fit the batch, or the graph that it leads to.
    """
    unread = UnreadValues({}) if unread is None else unread
    tree, tensors = flatten_batch(batch)
    input_tree, _ = passing(tree, unread.stand_ins)
    place = device or find_device(model, tensors)
    codes = _Program.forward.__code__, _call.__code__
    these = Leaves(model, loss_fn, place, codes, leaves, around)
    program = _Program(model, input_tree, tuple(tensors), loss_fn, around, row_dims, numbers, fixed, these, unread)
    with in_mode(model, training), tracing():
        graph = these.captured(lambda: _captured(program, tensors, training, place, casts_on_host))
    for told in these.warnings():
        warn_user(told, LeafWarning)
    _check_written_alone(graph, model)
    return graph


def _check_written_alone(graph: Graph, model: nn.Module) -> None:
    """Refuse a write to a buffer of which another tensor is a view: in a graph each is one of its own."""
    written = {leaf.name for leaf in graph.outputs if leaf.kind is OutputKind.BUFFER_UPDATE}
    state = {**graph.constants, **dict(model.named_parameters()), **dict(model.named_buffers())} if written else {}
    for pair in overlapping(state):
        if not written.isdisjoint(pair):
            raise CaptureError(
                f"forward writes to {' or '.join(map(repr, sorted(written.intersection(pair))))}, and {pair[0]!r} and "
                f"{pair[1]!r} share memory: what is written to one would not be read from the other\n"
                "hint: make one of them from the other in forward, where it is read"
            )


def _captured(
    program: _Program,
    tensors: Mapping[str, torch.Tensor],
    training: bool,
    device: torch.device,
    casts_on_host: bool,
) -> Graph:
    program.reading = None
    if not is_elsewhere(device):
        return _traced(program, tensors).graph(training)
    if casts_on_host or all(kind != device.type for kind, _ in program.autocasts):
        program.on_host = OnHost()
        program.autocasts_traced = program.autocasts if casts_on_host else ()
        attributes = program.on_host.instead_of_attributes(program.model)
        with contextlib.suppress(CaptureError), attributes, stand_in_state(program.model, stand_in_device):
            traced = _traced(program, tensors)
            if casts_on_host or not casts(traced.exported.graph_module):
                return traced.graph(training)
        program.on_host, program.autocasts_traced = None, program.autocasts
    with stand_in_state(program.model, lambda _: device, PARAMETERS):
        return _traced(program, tensors).graph(training)


def _traced(program: _Program, tensors: Mapping[str, torch.Tensor]) -> Assembly:
    """Trace, twice where the output has plain values: what is not the same both times would be wrong in every step."""
    exported, example, notes = _export_known(program, tensors)
    found, calls = replace(program.output), tuple(program.leaves.used.values())
    tree = found.tree()
    if plain_values(tree):
        with contextlib.suppress(Exception), later():
            _export_once(program, example, batch=False, rest=False)
            tree = steady(tree, program.output.tree())
    return Assembly(
        model=program.model,
        exported=exported,
        example=example,
        notes=notes,
        input_tree=program.input_tree,
        output_tree=tree,
        observed=found.more,
        has_loss_fn=program.loss_fn is not None,
        asked=program.asked,
        numbers=program.numbers,
        copies={} if program.on_host is None else program.on_host.copies,
        asks_layout=found.asks_layout,
        checks=found.checks,
        leaf_calls=calls,
        takes_one_row=program.has_one_row,
    )


def _call(function: LossFn, *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **kwargs)


@dataclass(eq=False)
class _OutputStructure:
    """What the trace finds out. Not an attribute of the module: export gives those back as they were."""

    found: Tree | None = None
    more: Tree | None = None
    asks_layout: str = ""
    mode: FakeTensorMode | None = None
    checks: tuple[Check, ...] = ()

    def tree(self) -> Tree:
        """Return the structure of the model's output."""
        assert self.found is not None, "the model was traced"
        return self.found


class _Program(nn.Module):
    """The model as a function from the batch's tensors to its output's tensors and the loss."""

    def __init__(
        self,
        model: nn.Module,
        input_tree: Tree,
        names: tuple[str, ...],
        loss_fn: LossFn | None,
        around: Around,
        asked: AskedRowDims,
        numbers: bool,
        fixed: bool,
        leaves: Leaves,
        unread: UnreadValues,
    ) -> None:
        super().__init__()
        self.model = model
        self.input_tree = input_tree
        self.names = names
        # Not as a submodule: what a loss module holds is a constant of the program, no state of the model.
        self.loss_fn = None if loss_fn is None else functools.partial(_call, loss_fn)
        self.call = LossCall(model.forward, loss_fn)
        self.autocasts = self.autocasts_traced = ambient_autocasts()
        self.on_host: OnHost | None = None
        self.output = _OutputStructure()
        self.around = around
        self.asked, self.numbers, self.fixed = asked, numbers, fixed
        self.leaves, self.unread = leaves, unread
        self.reading: RaisingChecks | None = None
        self.takes_derivatives = False
        self.row_dims: RowDims = {}
        self.has_one_row = False
        self.ties = tied_buffers(model)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.output.mode = detect_fake_mode(tensors)
        inputs = dict(zip(self.names, tensors, strict=True))
        self._tie_rows(inputs)
        batch = unflatten(self.input_tree, inputs | passed_values(self.unread.stand_ins))
        args, kwargs = as_call(batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(known_results(self.output.mode))
            derivatives = Derivatives() if self.takes_derivatives else None
            seen = stack.enter_context(NothingUnseen(derivatives))
            stack.enter_context(no_backward_is_lost())
            stack.enter_context(inference_is_no_grad())
            stack.enter_context(without_numbers())
            stack.enter_context(transforms_as_derivatives())
            if derivatives is not None:
                stack.enter_context(derivatives.seen())
            if self.reading is not None:
                stack.enter_context(KnownValues())
                stack.enter_context(self.reading.answering())
            if self.on_host is not None:
                stack.enter_context(self.on_host)
            for device_type, dtype in self.autocasts_traced:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(written_back(self.model, self.ties))
            more = stack.enter_context(self.around())
            stack.enter_context(self.leaves.tracing(inputs, self.autocasts_traced))  # ends before what is around
            with self.unread.watching():
                output = self.model(*args, **self.call.of_model(kwargs))
            self.output.asks_layout = seen.asks_layout
            tree, values = with_numbers(*flatten(output))
            self.output.found, self.output.more = tree, None
            with self.unread.watching():
                if more:
                    self.output.more, further = flatten({f"{OBSERVED} {name}": value for name, value in more.items()})
                    values |= further
                loss = () if self.loss_fn is None else (self._loss(output, *args, **kwargs),)
            violations = () if self.reading is None else self.reading.violations()
            return (*values.values(), *loss, *violations)

    def _loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.loss_fn is not None, "it is asked for where there is one"
        (given,) = self.loss_fn.args
        return _call(self.leaves.function(given), *args, **self.call.of_loss(kwargs))

    def _tie_rows(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the trace know from the start that all inputs of the batch have the same number of rows.

        Each has a symbol of its own for it, which it gives up where it meets another's; they may meet late, or never.
        """
        numbers = [tensors[name].shape[dim] for name, dim in self.row_dims.items()]
        assert all(number == numbers[0] for number in numbers), "the example was made so"


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model in training or evaluation mode; one that is there already is left alone, part by part."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace with gradients on, ambient autocast off, and give back the random state as it was."""
    install_patches("torch")
    with contextlib.ExitStack() as stack:
        stack.callback(clear_caches_of_sizes)
        for kind, _ in ambient_autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # a failed export prints its graph there
        stack.enter_context(without_fake_tensor_cache())
        stack.enter_context(without_collections())  # a tenth of a trace, which keeps nearly all that it makes
        warnings.simplefilter("ignore")
        for name in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"):  # of each attempt
            logger = logging.getLogger(name)
            logger.addFilter(_say_nothing)
            stack.callback(logger.removeFilter, _say_nothing)
        yield


def _say_nothing(record: logging.LogRecord) -> bool:
    return False


def _export_known(
    program: _Program, tensors: Mapping[str, torch.Tensor]
) -> tuple[ExportedProgram, Example, tuple[str, ...]]:
    """Export; where Python reads values, those that follow from constants are computed, and checks are answered."""
    with contextlib.suppress(GuardOnDataDependentSymNode):
        return _export(program, tensors, reads=False)
    program.reading = reading = RaisingChecks()
    with contextlib.suppress(CaptureError):
        return _export(program, tensors)
    program.reading = None  # it did not help, and what is tried next may not need it
    try:
        return _export(program, tensors)
    except CaptureError as error:
        raise reading.refusal or error from error.__cause__


def _export(
    program: _Program, tensors: Mapping[str, torch.Tensor], *, reads: bool = True
) -> tuple[ExportedProgram, Example, tuple[str, ...]]:
    """Export with all sizes dynamic, or else with the batch alone, or else with a static batch, or all sizes static.

    What fixes a batch most often is `len(x)`: the second attempt leaves it open, at a cost for every other call of it.
    The next ones take other dims for rows, where sizes or a trace show some.

    Raises:
        CaptureError: no attempt has gone through.
        GuardOnDataDependentSymNode: the first has not, as Python reads values; unless it `reads` them.
    """
    on_host, row_dims = program.on_host is not None, find_row_dims(tensors, program.asked)
    program.has_one_row = bool(row_dims) and count_rows(tensors, row_dims) == 1
    kept = make_example(tensors, program.model, row_dims, keep_batch=True, on_host=on_host)
    if program.fixed:
        return _export_fixed(program, kept, reads=reads), kept, ()
    example = make_example(tensors, program.model, row_dims, keep_batch=False, on_host=on_host)
    try:
        return _holding(_export_once(program, example, batch=True, rest=True), example, tensors), example, ()
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) and not reads:
            raise
        first_error = error
    for rest in (True, False):
        with contextlib.suppress(Exception), open_lengths():
            exported = _holding(_export_once(program, example, batch=True, rest=rest), example, tensors)
            return exported, example, () if rest else (_fixed("every size but the batch", first_error),)
    for find in (_only_dims_of_that_size, _dims_that_a_trace_shows):
        with contextlib.suppress(Exception):
            found = find(program, tensors, row_dims)
            shown = make_example(tensors, program.model, found, keep_batch=False, on_host=on_host)
            return _export_once(program, shown, batch=True, rest=True), shown, ()
    _check_rows_are_not_counted(program, example)
    for shown in () if program.has_one_row else (example, kept):
        with contextlib.suppress(Exception), open_lengths(), refusing_counted_rows():
            return _export_comparing_rows(program, tensors, shown), shown, ()
    with contextlib.suppress(Exception):
        exported = _export_once(program, kept, batch=False, rest=True)
        return exported, kept, _static_notes(program, example, first_error, rest=True)
    exported = _export_fixed(program, kept, reads=reads)
    return exported, kept, _static_notes(program, example, first_error, rest=False)


class _OneRow(Exception):
    """A trace for more rows does not hold for the one that there is."""


class _OfOtherSizes(Exception):
    """A trace holds for batches of other sizes than the user's."""


def _holding(exported: ExportedProgram, example: Example, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return a trace that says nothing of its sizes which is not so of the user's.

    A number that is made of several sizes (`int(1.25 * rows * length)`) fixes none of them, but what they are together.

    Raises:
        _OfOtherSizes: it does.
    """
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(example.tensors) :]
    pairs = zip(example.tensors, map(meta.shape, nodes), strict=True)
    sizes = {
        meta.expression(symbol): size
        for name, shape in pairs
        for symbol, size in zip(shape, tensors[name].shape, strict=True)
        if meta.is_symbolic(symbol)
    }
    for condition in size_guards(meta.fake_mode(exported.graph)):
        if isinstance(condition, sympy.Eq) and condition.subs(sizes) is sympy.false:
            raise _OfOtherSizes(f"{condition} is not so of the user's batch")
    return exported


def _export_comparing_rows(program: _Program, tensors: Mapping[str, torch.Tensor], example: Example) -> ExportedProgram:
    """Export what goes on by comparisons of the number of rows, for the numbers for which these come out alike.

    A comparison that makes no difference is forgotten: a trace on the other side of it shows that.

    Raises:
        CaptureError: the number of rows is fixed, or the trace does not hold for the user's.
    """
    made = _holding(_export_once(program, example, batch=Dim.AUTO, rest=True), example, tensors)
    compared = ComparedRows.of(made, example)
    if not compared.takes(count_rows(tensors, example.row_dims)):
        raise CaptureError("the trace holds for other numbers of rows")
    if program.reading is None and compared.others is not None:
        _forget_what_makes_no_difference(program, tensors, example, compared)
    return made


def _forget_what_makes_no_difference(
    program: _Program, tensors: Mapping[str, torch.Tensor], example: Example, compared: ComparedRows
) -> None:
    on_host, dims = program.on_host is not None, example.row_dims
    there = make_example(tensors, program.model, dims, keep_batch=False, on_host=on_host, least=compared.others)
    with _beside(program) as found, contextlib.suppress(Exception):
        made = _export_once(program, there, batch=Dim.AUTO, rest=True)
        same_output = repr(program.output.found) == repr(found.found) and not program.leaves.used
        if same_output and compared.matches_trace(ComparedRows.of(made, there)):
            compared.forget()


@contextlib.contextmanager
def _beside(program: _Program) -> Iterator[_OutputStructure]:
    """Trace what is only looked at: outputs, which it gives, and calls of leaves stay those of the trace before."""
    output, calls = program.output, dict(program.leaves.used)
    program.output = _OutputStructure()
    try:
        yield output
    finally:
        program.output, program.leaves.used = output, calls


def _check_rows_are_not_counted(program: _Program, example: Example) -> None:
    """Refuse what takes a count of values for the rows, so that a leaf is made of it, before the rows are fixed.

    Raises:
        RowsAreCounted: there is such a line, and something around it may be a leaf.
    """
    if not program.leaves.opens_rows:
        return
    try:
        with open_lengths(), refusing_counted_rows():
            _export_once(program, example, batch=True, rest=False)
    except RowCountError:
        raise
    except Exception:  # whatever keeps the rows from being open besides: they are fixed then
        return


def _export_fixed(program: _Program, example: Example, *, reads: bool) -> ExportedProgram:
    """Export with all sizes static: what fails is not of what was taken for rows or lengths."""
    try:
        return _export_once(program, example, batch=False, rest=False)
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) and not reads:
            raise
        raise explain_failure(error) from error


def _only_dims_of_that_size(program: _Program, tensors: Mapping[str, torch.Tensor], tried: RowDims) -> RowDims:
    """Return the row dims if every input has rows in the only dim that is as large as there are rows.

    Raises:
        CaptureError: that is nothing else than what was `tried`.
    """
    rows = count_rows(tensors, tried)
    sizes = {name: list(tensor.shape) for name, tensor in tensors.items() if not program.asked.has(name)}
    found = {name: found.index(rows) for name, found in sizes.items() if found.count(rows) == 1}
    return _other_than(tried, {**tried, **found})


def _dims_that_a_trace_shows(program: _Program, tensors: Mapping[str, torch.Tensor], tried: RowDims) -> RowDims:
    """Return the row dims that a trace in the user's sizes shows: what must be as large as the first input has rows.

    Raises:
        Exception: it cannot be traced so, or shows nothing else than what was `tried`.
    """
    first = next(iter(tried))
    known = {name: dim for name, dim in tried.items() if program.asked.has(name) or name == first}
    kept = make_example(tensors, program.model, known, keep_batch=True, on_host=program.on_host is not None)
    exported = _export_once(program, kept, batch=True, rest=True)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(tensors) :]
    shapes = {name: list(map(meta.expression, meta.shape(node))) for name, node in zip(tensors, nodes, strict=True)}
    rows = shapes[first][known[first]]
    return _other_than(tried, {name: sizes.index(rows) for name, sizes in shapes.items() if sizes.count(rows) == 1})


def _other_than(tried: RowDims, found: RowDims) -> RowDims:
    if found == tried:
        raise CaptureError("the rows are those that were tried")
    return found


def _export_once(program: _Program, example: Example, *, batch: Any, rest: bool) -> ExportedProgram:
    """Export, `batch` saying what the number of rows may be (`Dim`): True for any, False for the example's."""
    program.row_dims = example.row_dims
    rows: Any = _ROWS[batch] if isinstance(batch, bool) else batch
    exported = _exported(program, example, example.dynamic_shapes(rows, rest_is_dynamic=rest))
    if batch is not False and program.has_one_row:
        with _beside(program) as found:
            of_one = _exported(program, example.of_rows(1), example.dynamic_shapes(Dim.STATIC, rest_is_dynamic=rest))
            is_same = repr(program.output.found) == repr(found.found)
        if not is_same or not ComparedRows.of(exported, example).is_same_for_one(of_one):
            raise _OneRow("what is traced for more rows than one does not hold for one")
    program.output.checks = () if program.reading is None else program.reading.checks
    return exported


def _exported(program: _Program, example: Example, shapes: Any) -> ExportedProgram:
    """Export with these dynamic shapes; the inputs of a trace are dropped also where it fails."""
    inputs = tuple(example.tensors.values())

    def trace() -> ExportedProgram:
        try:
            return traced()
        except DerivativeTaken:
            program.takes_derivatives = True
            return traced()

    def traced() -> ExportedProgram:
        errors: list[Exception] = []

        def note(_: Any, error: Exception) -> NoReturn:
            errors.append(error)
            raise error

        try:
            with answering_guards(note):
                exported = torch.export.export(program, inputs, dynamic_shapes={"tensors": shapes}, strict=False)
        finally:
            drop_traced_inputs(program.output.mode)
            program.output.mode = None
        for error in filter(is_caught_by_the_user, errors):  # no call but a trace raises it
            raise error
        return exported

    reading = program.reading
    return program.leaves.trace_with_answers(trace if reading is None else lambda: reading.settled(trace))


def _static_notes(program: _Program, example: Example, error: Exception, *, rest: bool) -> tuple[str, ...]:
    """Say that the batch is static, and which line made it so (found by letting export fix it)."""
    with _beside(program), contextlib.suppress(Exception), watch_fixed_sizes() as lines:
        _exported(program, example, example.dynamic_shapes(Dim.AUTO, rest_is_dynamic=False))
    where = f" at {lines[0]}" if lines else ""
    why = f"{where} (len(x) and comparisons fix a size; row_dims says where rows are not dim 0)"
    note = _fixed("the batch size", error, why)
    return (note,) if rest else (note, "all other sizes are fixed, too")


def _fixed(what: str, error: Exception, where: str = "") -> str:
    return f"{what} is fixed by the model{where}: {reason(error)}"
