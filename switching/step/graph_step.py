"""The acts of one step of one variant's graphs on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.comm_ops.wire.consensus import any_rank
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OBSERVED, OutputKind
from hetu_fx.graph.tracing.autocasts import ambient_autocasts, casting
from hetu_fx.plans.schedule import Order, forwards, stage_orders
from hetu_fx.program.loss_type import LossType
from hetu_fx.program.program import Bindings, Program
from hetu_fx.switching.step.assigned_rows import AssignedRows
from hetu_fx.switching.step.batches import MicroBatchRows, ReadBatch
from hetu_fx.switching.step.compiled_plans import GraphVariant, StagePlan
from hetu_fx.switching.step.engine import Feeds, MicroBatchFeeds, StageOutcome
from hetu_fx.switching.step.execution import LossAndOutput, StepInputs
from hetu_fx.switching.step.filling import as_brought, filled_share, narrow_to_own_rows
from hetu_fx.switching.step.frame import StepFrame, ValueRoute, share_of_loss, value_routes
from hetu_fx.switching.step.gradients import Collector, RunAgain
from hetu_fx.transforms.lowering.units import UNITS, UnitPlan
from hetu_fx.transforms.specialize.device_graph import SlotKind

StepBatch = ReadBatch | AssignedRows


def find_stage(variant: GraphVariant, batch: StepBatch, inputs: StepInputs) -> StagePlan:
    """Return what runs a batch under a variant; collective where it has to be made."""
    wants_values = _gives_values(variant, batch, inputs) or batch.program.graph.observed is not None
    return variant.stage(batch.program, wants_values, splits=batch.splits)


def _gives_values(variant: GraphVariant, batch: StepBatch, inputs: StepInputs) -> bool:
    """Tell whether the user gets other outputs than the loss: those that are asked for, or at hand as on one device."""
    if _asks_for_values(batch, inputs):
        return True
    is_same = isinstance(batch, ReadBatch) and not batch.changes_values
    if not is_same or not inputs.has_values_at_hand(variant.plan):
        return False
    is_whole = variant.table.size == 1 or not _outputs_of_unknown_rows(batch.program)
    return is_whole and bool(batch.program.graph.outputs_of(OutputKind.VALUE))


def _asks_for_values(batch: StepBatch, inputs: StepInputs) -> bool:
    return inputs.wants_values(has_loss=bool(batch.program.loss_name), training=batch.program.graph.training)


class GraphStep(StepFrame):
    """The acts of a step, which `run_step` calls in order."""

    def __init__(self, variant: GraphVariant, batch: StepBatch, inputs: StepInputs) -> None:
        self.batch, self.program = batch, batch.program
        self.gives_values = _gives_values(variant, batch, inputs)
        self.wants_values = self.gives_values or self.program.graph.observed is not None
        _check_rows_can_be_put_together(self.program, batch.bindings, variant, inputs)
        if self.wants_values and not inputs.shared and variant.table.size > 1:
            _check_rows_of_outputs_are_known(self.program)
        self.stage = variant.stage(self.program, self.wants_values, splits=batch.splits)
        self.device = self.stage.device
        runs_ahead = not self.stage.deduced.annotated.runs_in_step
        in_float16 = self.program.in_float16
        super().__init__(
            variant,
            inputs,
            scale=share_of_loss(inputs, variant.table, adds_up=self.program.loss_type is LossType.SUM),
            may_run_ahead=runs_ahead,
            in_float16=in_float16,
            gives_values=_asks_for_values(batch, inputs) and bool(self.program.loss_name),
            needing=batch.needing,
            row_dims=self.program.row_dims,
        )
        # A compiled backward returns zeros for None, which the collector leaves out.
        self.is_direct = self.is_direct and not (self.stage.use.all_uses and variant.compute.backend)
        self.outcome = StageOutcome(timer=inputs.timer)
        self.routes = self._routes() if self.wants_values else ()
        if self.stage.units is not None:
            self.units = variant.compute.walk(self.stage.units, self.stage.bridge, self._first_visit(self.stage.units))

    def _first_visit(self, units: UnitPlan) -> int:
        """Return the first visit that a gradient comes back to."""
        return 0 if self.needing else units.first_of(self.variant.trained)

    def _passing(self) -> AbstractContextManager[object]:
        """Return what a forward runs in."""
        return nullcontext() if self.units is None else self.units.forward()

    def gather_parameters(self) -> Mapping[str, Tensor]:
        """Return what this rank computes with; a rank that the plan leaves out does what waits for idle time."""
        compute = self.parameters(self.stage.bridge)
        if self.device is None:
            self.inputs.stand_by()
        return compute

    def run_graphs(self, micro_batches: list[MicroBatchFeeds], compute: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run this rank's graphs; return its pieces of the outputs."""
        if not self.trains:
            return self._evaluate(micro_batches, compute)
        if self.runs_ahead:
            return self._run_scheduled(micro_batches, compute)
        return self._run_under_autograd(micro_batches, compute)

    def raise_checks(self) -> None:
        """Raise on all ranks what the forward raises for rows of any; collective if it may."""
        checks = self.program.checks
        if not checks:
            return
        own = self.outcome.checks  # of the stages of this rank, which may make none
        found = dict(zip(own, torch.stack(list(own.values())).tolist(), strict=True)) if own else {}
        raises = any_rank(self.table, [found.get(check.name, 0) > 0 for check in checks])
        for check in compress(checks, raises):
            raise check.error()

    def _pipelines_that_ran(self) -> tuple[int, ...]:
        pipelines = range(len(self.variant.plan.pipelines))
        if self.stage.talks_in_step:
            return tuple(pipelines)
        return tuple(p for p in pipelines if self.batch.has_rows(p, self.inputs.rows))

    def write_buffers(self) -> None:
        """Write what buffers have become where they are at home."""
        if self.stage.updates:
            self.inputs.buffers.write(self.outcome.updates, self.stage.updates_of(self._pipelines_that_ran()))
            self.inputs.buffers.sync()  # scripts read buffers where they stand

    def tie_to_autograd(self, values: dict[str, Tensor]) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return outputs and this rank's loss as results of one node of the user's autograd graph."""
        local = self._local_loss() if self.program.loss_name else None
        return self.outside(values, self.routes, local)

    def return_outputs(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the rows that this rank asked for; observers of submodules are given theirs."""
        has_work = self.device is not None and len(self.interval) > 0
        made = self.own_outputs(self.routes, values, has_work=has_work)
        if isinstance(self.batch, ReadBatch):
            made = as_brought(self.batch, made)
        graph = self.program.graph
        if graph.observed is None:
            return made
        self.inputs.tell(graph.of_observed({name: value.detach() for name, value in made.items()}))
        return {name: value for name, value in made.items() if self.gives_values and not name.startswith(OBSERVED)}

    def sum_loss(self, local: Tensor | None) -> Tensor | None:
        """Return the loss over all rows; None where the model returns none."""
        return None if local is None else self.global_loss(local, self.stage.contributes_loss)

    def rebuild(self, loss: Tensor | None, outputs: dict[str, Tensor]) -> LossAndOutput:
        """Return all as the model returns it."""
        named = outputs if loss is None else {**outputs, self.program.loss_name: loss}
        return LossAndOutput(loss, self.program.graph.rebuild({**named, **self.batch.passed}))

    def cut_micro_batches(self) -> list[MicroBatchFeeds]:
        """Return what this rank's graphs run, brought from the ranks that have the rows."""
        inputs = self.inputs
        self.program.check_counts(inputs.counts)
        cuts = self.batch.cuts(
            inputs.rows, self.variant.plan, self.table, shared=inputs.shared, readers=self.stage.facts.readers
        )
        if isinstance(self.batch, ReadBatch) and self.batch.sizes_of and self._may_narrow():
            narrow = [narrow_to_own_rows(self.batch, cut, inputs.rows) for cut in cuts]
            self.outcome.timer.share = filled_share(narrow, cuts)
            cuts = narrow
        return [self._micro_batch(cut) for cut in cuts]

    def _may_narrow(self) -> bool:
        """Tell whether micro-batches may have sizes of their own: nothing is made of several of them together."""
        plan = self.variant.plan
        shares = plan.sequence_parallel or any(stage.shares_sequence for *_, stage in plan.stages)
        together = (
            self.needing or self.stage.talks_in_step or self.stage.facts.draws_by_token or self._needs_equal_sizes
        )
        return not shares and not together

    @property
    def _needs_equal_sizes(self) -> bool:
        """Whether outputs of rows of unlike sizes could not be put together: all but those of rows, of one pass."""
        of_rows = all(route.rows_dim is not None and not route.summed for route in self.routes)
        return bool(self.routes) and not (of_rows and self.trains and not self.runs_ahead)

    def _micro_batch(self, cut: MicroBatchRows) -> MicroBatchFeeds:
        rows = self.leaves_of(cut.tensors)
        feeds: dict[tuple[SlotKind, str], Any] = {(SlotKind.INPUT, n): t for n, t in rows.items()}
        if self.stage.facts.random_states:
            state = torch.tensor([self.inputs.seed, self.inputs.draw, cut.first_row], dtype=torch.int64)
            feeds.update({(SlotKind.RANDOM_STATE, name): state for name in self.stage.facts.random_states})
        all_rows = self.stage.deduced.annotated.graph.all_rows
        total = {} if all_rows is None else {all_rows: self.inputs.rows.total}
        return MicroBatchFeeds(cut.rows, feeds, {**cut.bindings, **total})

    def _shared_feeds(self, compute: Mapping[str, Tensor]) -> Feeds:
        feeds: dict[tuple[SlotKind, str], Any] = {(SlotKind.PARAMETER, n): t for n, t in compute.items()}
        for name, annotation in self.stage.buffers.items():
            part = self.inputs.buffers.read(name, annotation)
            # A buffer that this step updates is written before backward, which may still need the old value.
            feeds[SlotKind.BUFFER, name] = part.clone() if name in self.stage.updates else part
        feeds[UNITS.kind, UNITS.name] = self.units
        feeds.update({(SlotKind.CONSTANT, name): value for name, value in self.stage.constants.items()})
        for name, dtype, count in zip(
            self.program.counts, self.stage.facts.count_dtypes, self.inputs.counts, strict=True
        ):
            feeds[SlotKind.COUNT, name] = torch.as_tensor(count, dtype=dtype)
        return feeds

    def _evaluate(self, micro_batches: list[MicroBatchFeeds], compute: Mapping[str, Tensor]) -> dict[str, Tensor]:
        engine = self.stage.engine
        with self._passing():
            if engine is not None and self.device is not None:
                orders, skips = self._orders(len(micro_batches), train=False), not self.stage.talks_in_step
                feeds, timer = self._shared_feeds(compute), self.outcome.timer
                self.outcome = engine.run(orders, micro_batches, feeds, train=False, timer=timer, skips_empty=skips)
        return self._joined()

    def _joined(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the outputs, of all micro-batches together."""
        made = self.outcome.values
        if not made:
            return {}
        return {route.name: route.joined(made[route.name]) for route in self.routes if route.name in made}

    def _run_under_autograd(
        self, micro_batches: list[MicroBatchFeeds], compute: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a stage without neighbours, so that backward is ordinary autograd."""
        if not self.is_direct:
            collector = self._collector(compute)
            collector.listen()
            compute = collector.leaves
        with self._passing():
            if self.stage.engine is not None and (micro_batches[0].rows or self.stage.talks_in_step):
                self.stage.engine.forward(micro_batches[0], self._shared_feeds(compute), self.outcome)
        made = {name: value for name, (value,) in self.outcome.values.items()}
        is_narrow = isinstance(self.batch, ReadBatch) and bool(self.batch.sizes_of)
        narrowed = [route for route in self.routes if is_narrow and route.name in made]
        return made | {route.name: route.filled_up(made[route.name], self.table) for route in narrowed}

    def _run_scheduled(self, micro_batches: list[MicroBatchFeeds], compute: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run forwards and backwards now; hand the gradients out in backward."""
        if self.program.loss_name == "":
            raise StateError(
                f"a plan with pipeline stages or several micro-batches runs backward inside forward, so the loss must "
                f"come from the model, and {_which_may_be(self.program)}\nhint: name the loss 'loss', return it first, "
                f"or pass loss_fn=... to hetu_fx.auto_parallelize"
            )
        collector = self._collector(compute)
        rerun: RunAgain = _rest
        if self.stage.engine is not None and self.device is not None:
            orders = self._orders(len(micro_batches), train=True)
            feeds, timer = self._shared_feeds(collector.leaves), self.outcome.timer
            run = partial(self.stage.engine.run, orders, micro_batches, feeds, train=True, timer=timer)
            with collector.noting():
                self.outcome = run(root=self.root, before_last_gradients=self._listening(collector))
            rerun = partial(_run_again, run, self._scale, self.table)
        if self.program.in_float16:
            collector.run_again = rerun
        collector.ran()
        return self._joined()

    def _orders(self, num_micro_batches: int, *, train: bool) -> Sequence[Order]:
        """Return what the stages of this rank's pipeline do of so many micro-batches."""
        assert self.device is not None, "it runs a stage"
        deal = self.stage.deduced.annotated.pipelines[self.device.layout.pipeline].deal
        if not train:
            return [forwards(num_micro_batches, deal.num_stages, deal.chunks)] * deal.num_stages
        return stage_orders(self.variant.plan.schedule, deal.num_stages, num_micro_batches, deal.chunks)

    def _listening(self, collector: Collector) -> Callable[[], None] | None:
        """Return what lets gradients travel beside the last backward; None where they may not.

        A device that sends by itself carries out its calls one after another, of whatever groups: gradients that wait
        for a stage before this one would keep from it the cotangents that it waits for.
        """
        device = self.device
        assert device is not None, "it runs a stage"
        may_wait = device.num_stages > 1 and self.table.is_native(self.variant.device)
        return None if may_wait else collector.listen

    def _collector(self, compute: Mapping[str, Tensor]) -> Collector:
        """Make the compute tensors leaves of this step's autograd graph."""
        used = self.stage.use.used(self.table, has_loss=bool(self.program.loss_name))
        return self.collector(self.stage.bridge, compute, overlaps=not self.stage.talks_in_step, used=used)

    def _local_loss(self) -> Tensor:
        """Return this rank's part of the loss, zero where it computes none."""
        if self.outcome.loss is not None:
            return self.outcome.loss
        assert self.stage.facts.loss_form is not None, "the program has one"
        shape, dtype = self.stage.facts.loss_form
        return torch.zeros(shape, dtype=dtype, device=self.variant.device)

    def _routes(self) -> tuple[ValueRoute, ...]:
        bindings = self.batch.bindings
        return value_routes(self.stage.deduced, self.inputs.rows, bindings, shared=self.inputs.shared)


def _check_rows_can_be_put_together(
    program: Program, bindings: Bindings, variant: GraphVariant, inputs: StepInputs
) -> None:
    """Refuse rows of which the graph does not hold, and ranks' own where inputs have none, or may have others.

    Raises:
        BatchError: on every rank.
    """
    program.check_rows(bindings, inputs.rows.total + inputs.rows.others)
    is_put_together = variant.table.size > 1 and not inputs.shared
    if is_put_together and program.doubt:
        raise BatchError(program.doubt)
    has_no_rows = program.graph.batch_symbol is None and any(meta.shape(leaf.node) for leaf in program.inputs)
    if has_no_rows and is_put_together:
        raise BatchError(
            f"inputs have no rows in this model's graph, so that those of {variant.table.size} ranks cannot be put "
            f"together ({'; '.join(program.graph.notes)})\nhint: give all ranks the same whole batch by data='global'"
        )


def _check_rows_of_outputs_are_known(program: Program) -> None:
    """Refuse outputs of a graph with a fixed batch: which of their dims count rows, to be cut, is not known.

    Raises:
        BatchError: on every rank.
    """
    graph, found = program.graph, _outputs_of_unknown_rows(program)
    if found:
        raise BatchError(
            f"the batch size is fixed in this model's graph, so that it is not known which rows of its outputs {found} "
            f"are this rank's ({'; '.join(graph.notes)})\nhint: ask for the loss alone (outputs='loss'), give all "
            f"ranks the same whole batch by data='global', or rewrite the line"
        )


def _which_may_be(program: Program) -> str:
    """Say which outputs may be the loss, where it is not told which is."""
    found = [leaf.name for leaf, node in program.graph.outputs_of(OutputKind.VALUE) if _is_trained(node, program)]
    return f"which of its outputs {found} is the loss is not told" if found else "it returns no number to train by"


def _is_trained(node: fx.Node, program: Program) -> bool:
    return meta.shape(node) == () and node in program.flow.differentiable


def _outputs_of_unknown_rows(program: Program) -> list[str]:
    """Return the outputs of a graph with a fixed batch, whose dims of rows are not known."""
    values = program.graph.outputs_of(OutputKind.VALUE)
    return [] if program.graph.fixed_rows is None else [leaf.name for leaf, node in values if meta.shape(node)]


def _rest(gradient: float) -> None:
    """Do nothing on a rank that the plan leaves out."""


def _run_again(run: Callable[..., StageOutcome], scale: float, table: GroupTable, gradient: float) -> None:
    """Run a step's schedule again, in backward, for the gradient of the loss; only gradients are kept."""
    with without_autocast(), using(table):
        run(root=gradient * scale)


def without_autocast() -> AbstractContextManager[object]:
    """Run a graph as it is: the casts of an ambient autocast were written into it when it was captured."""
    return casting(()) if ambient_autocasts() else nullcontext()
