"""Capture a model as it is now: its own forward, on stand-ins of its parameters, watched for what it reads.

What a captured program shows of its rows, where they were taken to be dim 0 and meet in the model. Rows of a batch are
independent of each other, or meet in all of them alike. A time-first input (torch's own order for recurrent and
attention modules) is independent along another dim, which labels may have as their only one. Nothing proves what the
user means, so what is found is used with a warning where all that is seen agrees, and is a doubt, with which ranks'
rows are not put together, where it does not.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.base.dtypes import is_real
from hetu_fx.base.torch_private import BACKWARD_HOOKS, CALLS, FORWARD_HOOKS
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.deduction.rules.call import read_call
from hetu_fx.errors import BatchError, CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, GivenBatch, LossCall, flatten_batch
from hetu_fx.graph.calls import operand, viewed_argument
from hetu_fx.graph.capture import Around, capture
from hetu_fx.graph.edit import ancestors
from hetu_fx.graph.functional import SAME_VALUE
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.leaves.leaf_ops import CONSTANTS, told_nodes
from hetu_fx.graph.neutral import PARAMETERS, stand_in_device, stand_in_state
from hetu_fx.graph.numbers import later
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims, RowDims, find_row_dims
from hetu_fx.graph.tracing.contents import ABSENT, PLAIN, put, same
from hetu_fx.graph.unread import UnreadValues, ValueRead
from hetu_fx.program.caches import are_caches
from hetu_fx.program.filling_safety import Buffers, random_outputs
from hetu_fx.program.observed import Observers, check_hooks, hooks_must_change
from hetu_fx.program.program import AS_IT_STANDS, Program, make_program, same_constants
from hetu_fx.program.reads import Access, NotKept, Read, Reads, is_of_the_trace, show_value
from hetu_fx.program.watched import Watch
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides

_TRIALS = 2
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Evidence:
    """What was found: the dims that are used as rows (None: as they were taken), or why nobody can tell."""

    used: RowDims | None = None
    doubt: str = ""


NOTHING = Evidence()
Capture = Callable[[RowDims], Program]


def _evidence_of_rows(program: Program, assumed: RowDims, capture: Capture, buffers: Buffers) -> Evidence:
    """Return what a program shows, whose rows were taken to be the dims `assumed`.

    Args:
        program: in training, with a loss.
        assumed: by the inputs' names.
        capture: gives the program of the same model with other dims as rows.
        buffers: gives those of the model.
    """
    if positions := list(dict.fromkeys(_positions_of_rows(program))):
        return Evidence(doubt=_doubt_of_positions(positions))
    loss = program.graph.loss
    if loss is None or not assumed:
        return NOTHING
    rows, tail = _class_of_rows(program, assumed), _linear_in(program.factors, loss)
    if not _meet(program.factors, loss, rows, tail) or not program.mixes_rows:
        return NOTHING
    found = [dims for dims in _others(program, assumed) if not capture(dims).mixes_rows]
    if not found:
        return NOTHING
    of_all = any(program.factors.op(node).reduced & rows for node in tail if program.factors.is_op(node))
    has_labels = any(dims.get(name) == 0 and name not in assumed for dims in found for name in dims)
    ordered = has_labels or _goes_by_order(program, rows, buffers)
    if not of_all and not ordered:
        return NOTHING
    if len(found) == 1 and not of_all:
        return Evidence(used=found[0])
    return Evidence(doubt=_doubt(assumed, found))


def _row_dims_warning(used: RowDims) -> str:
    """Return what is to be said of dims that are used without being asked for."""
    return (
        f"entries along dim 0 of the inputs meet in the model, and its loss is one over another dim: the rows of the "
        f"batch are taken to be dims {dict(used)}\nhint: say so by row_dims={dict(used)}, or which they are"
    )


def _doubt(assumed: RowDims, found: list[dict[str, int]]) -> str:
    others = " or ".join(map(str, found))
    return (
        f"rows of the inputs were taken to be dims {dict(assumed)}, along which they meet in the model, but they are "
        f"independent of each other along dims {others}\nhint: say which dims count the rows: row_dims={found[0]} "
        f"if the batch is that dim, as in time-first inputs, or row_dims={dict(assumed)}"
    )


def _doubt_of_positions(names: list[str]) -> str:
    told = " and ".join(map(repr, names))
    return (
        f"the values of input {told} are positions in the rows of another input, which begin at 0 on every rank: rows "
        f"of ranks cannot be put together\nhint: pass the batch of all ranks to each, by data='global', or pass no "
        f"positions: torch.arange(len(x)) inside the forward counts all rows, and entries of one length are a tensor "
        f"of two dims"
    )


def _positions_of_rows(program: Program) -> Iterator[str]:
    """Yield the inputs whose values are read as positions in the rows of another input, or in what is made of them."""
    inputs = {leaf.node: leaf.name for leaf in program.inputs}
    rows = {program.graph.batch_symbol, program.graph.all_rows}
    for node in filter(program.factors.is_op, program.graph.graph.nodes):
        op = program.factors.op(node)
        for place, pointed, dim in op.traits.points(read_call(node)) if op.traits.points else ():
            name = inputs.get(_same_values(op.operands[place].node))
            size = meta.expression(meta.shape(op.operands[pointed].node)[dim])
            if name is not None and rows & getattr(size, "free_symbols", set()):
                yield name


def _same_values(node: fx.Node) -> fx.Node:
    """Return what a value is a part of, or the same as in another dtype, or gathered from all replicas."""
    same = {*SAME_VALUE, torch.ops.hetu.place_rows.default}
    while node.op == "call_function" and (node.target in same or viewed_argument(node) is not None):
        node = operand(node)
    return node


def _others(program: Program, assumed: RowDims) -> Iterator[dict[str, int]]:
    """Yield the dims that inputs have in common, of an open size and not those of the rows.

    All inputs that were taken to have rows have such a dim; what no op reads shows nothing.
    """
    read = [leaf for leaf in program.inputs if any(map(program.factors.is_op, leaf.node.users))]
    dims = {leaf.name: program.factors.dims(leaf.node) for leaf in read}
    rows = _class_of_rows(program, assumed)
    open_classes = dict.fromkeys(
        classes[0]
        for name in filter(dims.__contains__, assumed)
        for classes in dims[name]
        if len(classes) == 1 and classes[0].size is None and classes[0] not in rows
    )
    for cls in open_classes:
        common = {name: found.index((cls,)) for name, found in dims.items() if found.count((cls,)) == 1}
        if common.keys() >= assumed.keys() & dims.keys():
            yield common


def _class_of_rows(program: Program, assumed: RowDims) -> frozenset[FactorClass]:
    leaves = {leaf.name: leaf.node for leaf in program.inputs}
    return frozenset(cls for name, dim in assumed.items() for cls in program.factors.dims(leaves[name])[dim])


def _linear_in(factors: FactorMap, loss: fx.Node) -> frozenset[fx.Node]:
    """Return the values that the loss is linear in, itself among them."""

    def linear(node: fx.Node) -> Iterable[fx.Node]:
        if not factors.is_op(node):
            return node.all_input_nodes if node.op == "call_function" else ()
        op = factors.op(node)
        places = frozenset().union(*op.linear)
        return [operand.node for place, operand in enumerate(op.operands) if place in places]

    return ancestors([loss], linear)


def _meet(factors: FactorMap, loss: fx.Node, rows: frozenset[FactorClass], tail: frozenset[fx.Node]) -> bool:
    """Tell whether an op that makes the loss, but for its last sums, looks across rows: cheaper than a deduction."""
    ops = map(factors.op, filter(factors.is_op, ancestors([loss]) - tail))
    return any(rows & (op.whole | op.reduced) for op in ops)


def _goes_by_order(program: Program, rows: frozenset[FactorClass], buffers: Buffers) -> bool:
    """Tell whether the loss of random inputs changes with the order of what were taken to be rows; tried on a few."""
    dims = {
        leaf.name: [dim for dim, classes in enumerate(program.factors.dims(leaf.node)) if rows & set(classes)]
        for leaf in program.inputs
    }
    try:
        return any(_changes(program, dims, buffers, number) for number in range(_TRIALS))
    except Exception:  # whatever ops raise on sizes and values that they were not meant for: nothing is known
        return False


def _changes(program: Program, dims: Mapping[str, list[int]], buffers: Buffers, number: int) -> bool:
    random = torch.Generator().manual_seed(number)
    given = {leaf.name: _sample(leaf.node, random) for leaf in program.inputs}
    turned = {
        name: tensor.roll([1] * len(dims[name]), dims[name]) if dims[name] else tensor for name, tensor in given.items()
    }
    place = [leaf.name for leaf in program.graph.outputs].index(program.loss_name)
    one, other = (random_outputs(program, buffers, tensors, number)[place] for tensors in (given, turned))
    return bool((one - other).abs() > _TOLERANCE * one.abs())


def _sample(node: fx.Node, random: torch.Generator) -> Tensor:
    shape, dtype = meta.hints(node), meta.dtype(node)
    if is_real(dtype):
        return torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=random).to(dtype)


Forward = Callable[..., Any]


@dataclass(frozen=True)
class _Traced:
    """What a trace has found: the model's own graph, which parameters are not trained, and what was read."""

    source: Graph
    frozen: frozenset[str]
    watch: Watch

    def program(self, overrides: OpOverrides) -> Program:
        return make_program(self.source, self.frozen, overrides)


class Tracer:
    """Makes programs of a model.

    Args:
        model: the user's.
        loss_fn: what makes the loss, if the model does not.
        overrides: how ops are run in its programs.
        casts_on_host: torch.autocast casts what it casts on the host, wherever the model is.
        row_dims: what the user has said of the rows of inputs.
        outputs: which outputs beside the loss are wanted, as for `auto_parallelize`.

    Attributes:
        replaced: what somebody has put in the place of the forward of the model's class, if anybody has.
        given: the model's program, which needs no trace; None: there is none.
        observers: of its submodules, whose outputs are outputs of its programs.
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
        self.model, self.loss_fn, self.overrides = model, loss_fn, overrides
        self.casts_on_host, self.row_dims, self.outputs = casts_on_host, row_dims, outputs
        self.replaced: Forward | None = None
        self.given: Program | None = None
        self.observers = Observers(model)
        self._unread = UnreadValues({})
        self._told_of = set[str]()
        self._lost: dict[tuple[int, str], tuple[Access, Any]] = {}

    def trace(self, batch: Batch, training: bool) -> tuple[Program, Reads]:
        """Capture the model for batches like this one, with this one's sizes as the example's; and what it has read.

        Plain values of the batch that it does not read are `Passed` in the graph's trees.
        """
        if self.given is not None:
            return self.given, Watch(self.model, None).reads(())
        self._unread = UnreadValues(GivenBatch.of(batch).passable)
        try:
            while True:
                try:
                    made = self._trace(batch, training)
                except (ValueRead, Exception):
                    if not self._unread.take_out(failed=True):
                        raise
                else:
                    if not self._unread.take_out(failed=False):
                        return made
        finally:
            self._unread = UnreadValues({})

    def _trace(self, batch: Batch, training: bool) -> tuple[Program, Reads]:
        traced = self._traced(batch, training)
        program, told = traced.program(self.overrides), traced.watch.surroundings.told
        if told and told not in self._told_of:
            self._told_of.add(told)
            warn_user(told)
        if training and not self.row_dims.dims:
            found = self._evidence(batch, program)
            program = replace(program, doubt=found.doubt) if found.doubt else program
            if found.used is not None:
                warn_user(_row_dims_warning(found.used))
                self.row_dims = AskedRowDims(found.used)
                traced = self._traced(batch, training)
                program = traced.program(self.overrides)
        return program, traced.watch.reads([Read("'forward' of the model", vars(self), "replaced")])

    def _evidence(self, batch: Batch, program: Program) -> Evidence:
        """Return what a program shows of its rows, which sizes alone have told so far."""

        def capture_with(dims: RowDims) -> Program:
            asked, self.row_dims = self.row_dims, AskedRowDims(dims)
            try:
                return self._traced(batch, True).program(self.overrides)
            finally:
                self.row_dims = asked

        assumed = program.row_dims or find_row_dims(flatten_batch(batch)[1])
        return _evidence_of_rows(program, assumed, capture_with, self.model.get_buffer)

    def source(self, batch: Batch, training: bool) -> Graph:
        """Capture the model's own graph for batches like this one, as no rewrite has seen it.

        Raises:
            CaptureError: the model cannot be captured.
        """
        return self._traced(batch, training).source

    def _traced(self, batch: Batch, training: bool) -> _Traced:
        check_hooks(self.model)
        traced = self._trace_once(batch, training)
        traced.watch.surroundings.check()
        traced = self._traced_again(batch, training, traced) if traced.watch.changed else traced
        self._check_clocks(batch, training, traced)
        return traced

    def _check_clocks(self, batch: Batch, training: bool, traced: _Traced) -> None:
        """Raise CaptureError if a clock that the user's own functions read shows in the graph.

        A later clock makes another graph, or none; what is only logged, or an output, makes the same.
        """
        clocks = traced.watch.clocks
        if not clocks:
            return
        with suppress(Exception), warnings.catch_warnings(), later(clocks):
            warnings.simplefilter("ignore")  # the first trace has warned
            if _are_same(self._trace_once(batch, training).source, traced.source):
                return
        names = ", ".join(dict.fromkeys(name for _, name in clocks))
        raise CaptureError(
            f"the forward goes on by the time ({names}), which a captured graph would keep as it was when it was made\n"
            f"hint: pass it in as a tensor or keep it in a buffer, or use "
            f'hetu_fx.auto_parallelize(..., capture="eager")'
        )

    def _traced_again(self, batch: Batch, training: bool, before: _Traced) -> _Traced:
        """Return the trace of a forward that has left itself otherwise, where it keeps no state by that.

        One that has only marked that it has run is traced as it has left itself; a cache is made anew in every step.

        Raises:
            CaptureError: it keeps state.
        """
        changed = before.watch.changed
        if all(isinstance(left, PLAIN) and isinstance(access.owner, dict) for access, left in changed):
            for access, left in changed:
                put(access.owner, access.name, left)
            again = self._trace_once(batch, training)
            if not again.watch.changed and _are_same(again.source, before.source):
                return again
            for access, _ in changed:
                access.put_back()
        elif self._are_caches(batch, training, before):
            names = ", ".join(access.label for access, _ in changed)
            note = f"the forward keeps what follows from sizes ({names}): it is made anew in every step, and not kept"
            return replace(before, source=before.source.with_note(note))
        told = "; ".join(f"{access.label}: {show_value(access.copy)} -> {show_value(left)}" for access, left in changed)
        raise CaptureError(
            f"the forward keeps state in Python, which a captured graph cannot do: {told} (before and after a call)\n"
            f"hint: keep it in a buffer (register_buffer), change it outside of the forward, or use "
            f'hetu_fx.auto_parallelize(..., capture="eager")'
        )

    def _are_caches(self, batch: Batch, training: bool, before: _Traced) -> bool:
        loss_fn = self._loss_fn_for(batch, training)

        leaves = {module for call in before.source.leaf_calls for module in call.invocation.holder.children()}

        def capture_calls(calls: nn.Module, batches: Batch) -> Graph:
            watch = Watch(self.model, None)
            return self._captured(calls, batches, training, watch, watch.watching, fixed=True, leaves=leaves)

        kept = [access for access, _ in before.watch.changed]
        return are_caches(kept, self.model, loss_fn, batch, before.program(self.overrides), capture_calls)

    def _trace_once(self, batch: Batch, training: bool) -> _Traced:
        loss_fn = self._loss_fn_for(batch, training)
        watch = Watch(self.model, loss_fn)
        frozen = frozenset(n for n, p in self.model.named_parameters() if not p.requires_grad)
        graph = self._captured(
            self.model,
            batch,
            training,
            watch,
            partial(self._around, watch),
            loss_fn=loss_fn,
            row_dims=self.row_dims,
            numbers=self.outputs == "all" or (self.outputs == "auto" and not training),
        )
        return _Traced(graph, frozen, watch)

    def _captured(
        self, module: nn.Module, batch: Batch, training: bool, watch: Watch, around: Around, **how: Any
    ) -> Graph:
        """Capture the model, or a module that calls it."""
        device = next((home.device for home in self.model.parameters()), None)
        # Parameters are not computed with: what stands in for them on the host has memory that is never touched. Also
        # before they are home tensors: export leaves weak references to what it traces, and a tensor that has some
        # cannot be swapped for its home tensor.
        with (
            stand_in_state(self.model, stand_in_device, PARAMETERS, anew=True),
            _called_as_its_own(self.model, self.replaced),
            hooks_must_change(self.model),
            self._without_what_is_lost(watch),
            _own_containers(self.model),
        ):
            return capture(
                module,
                batch,
                training=training,
                around=around,
                device=device,
                casts_on_host=self.casts_on_host,
                unread=self._unread,
                **how,
            )

    @contextmanager
    def _around(self, watch: Watch) -> Iterator[Mapping[str, Any]]:
        with watch.watching(), self.observers.collecting() as found:
            self._unread.check_classes(watch.asks_classes)
            yield found
            self._unread.check_classes(watch.asks_classes)

    @contextmanager
    def _without_what_is_lost(self, watch: Watch) -> Iterator[None]:
        """Let attributes be what they were before any capture; afterwards those that forwards set refuse to be used."""
        for access, value in self._lost.values():
            if isinstance(access.now, NotKept):
                put(access.owner, access.name, value)
        try:
            yield
        finally:
            for access, left in watch.written:
                kept = NotKept(access.label) if is_of_the_trace(left) else left
                put(access.owner, access.name, kept)
                self._lost.setdefault((id(access.owner), access.name), (access, access.before))

    def _loss_fn_for(self, batch: Batch, training: bool) -> Callable[..., Any] | None:
        """Return the loss function; in evaluation, none for a batch without what it needs (labels).

        Raises:
            BatchError: a batch of training lacks it.
        """
        forward = self.replaced or MethodType(type(self.model).forward, self.model)
        missing = LossCall(forward, self.loss_fn).missing(batch)
        if missing and training:
            raise BatchError(
                f"loss_fn cannot be called with the output and this batch: {missing}\nhint: pass what it takes in the "
                f"batch, under the name that it has there"
            )
        return None if missing else self.loss_fn


@contextmanager
def _own_containers(model: nn.Module) -> Iterator[None]:
    """Give modules the lists and dictionaries that they had: torch.export leaves copies of them."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for space, had in before:
            space.update({name: value for name, value in had.items() if same(space.get(name, ABSENT), value)})


def _are_same(one: Graph, other: Graph) -> bool:
    """Tell whether two graphs consist of the same, numbers and constants included."""
    told, others = (list(told_nodes(graph.graph, (*CONSTANTS, int, complex))) for graph in (one, other))
    return told == others and same_constants(one, other)


@contextmanager
def _called_as_its_own(model: nn.Module, replaced: Forward | None) -> Iterator[None]:
    """Let the model run its own forward for a while: its class's, or what somebody had `replaced` it with.

    Without its hooks, which are called around every step anyway.
    """
    space = vars(model)
    before = {name: space.get(name, ABSENT) for name in (*CALLS, *FORWARD_HOOKS, *BACKWARD_HOOKS)}
    for name in CALLS:
        put(space, name, ABSENT if name != "forward" or replaced is None else replaced)
    space.update({name: OrderedDict() for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS)})
    try:
        yield
    finally:
        for name, value in before.items():
            put(space, name, value)
