"""Run a model as the module it is, data parallel with uneven shares: for models that cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial
from hetu_fx.base.dtypes import is_real
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.base.words import bytes_text
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.wire.consensus import any_rank
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.objects.messages import broadcast
from hetu_fx.errors import PlanError, StateError
from hetu_fx.graph.bind import Batch
from hetu_fx.graph.containers import loss_alone, unflatten
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims
from hetu_fx.graph.tracing.autocasts import ambient_autocasts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.observed import Observers
from hetu_fx.program.structure import Structure
from hetu_fx.program.tracer import Forward
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.eager.module import (
    EagerBatch,
    EagerModule,
    EagerOutput,
    OutputForm,
    check_same,
    common_form,
    eager_routes,
    form_of_output,
    tell,
)
from hetu_fx.switching.eager.random_numbers import RandomNumbers
from hetu_fx.switching.eager.row_mode import NOT_KNOWN, RowMode
from hetu_fx.switching.home.ops import get_home_layout
from hetu_fx.switching.step.batches import same_inputs
from hetu_fx.switching.step.execution import LossAndOutput, Reading, StepInputs, check_takes_any_row
from hetu_fx.switching.step.frame import StepFrame, ValueRoute, share_of_loss
from hetu_fx.switching.step.rows import rows_for_pipeline
from hetu_fx.switching.step.used import GradientUse
from hetu_fx.switching.step.variant import Variant

_BY_ROWS_TEXT = (
    "capture='eager' with several replicas: each runs its own rows, as the example has shown, or check=False says, "
    "that this gives what one device gives. In later batches a mean over tokens, of which rows have unequal numbers, "
    "or anything else that the forward works out from several rows and the example does not show, would differ from "
    "one device"
)
_CURE = (
    "hint: leave capture='eager' out: the parts that need all rows become leaves, and all else is parallel; "
    "hetu_fx.leaf(module) names the smallest one"
)


def on_one_device_text(mode: RowMode, plan: Plan) -> str:
    """Return the warning that a plan for one device was made, and why."""
    return (
        f"capture='eager', plan='auto': device {plan.devices[0]} alone runs the module, on all rows of the batch, as "
        f"{mode.why}; more devices would each do the whole batch's work\n{_CURE}"
    )


class EagerVariant(Variant):
    """A data parallel plan, and the bridge to and from its replicas, which share a batch as `mode` says."""

    def __init__(
        self, name: str, plan: Plan, compute: Compute, planned_rates: Mapping[int, float], mode: RowMode
    ) -> None:
        super().__init__(name, plan, compute, planned_rates)
        self.mode, self.repeats_rows = mode, len(plan.pipelines) > 1 and not mode.by_rows
        self.rows_told = f"all of them on each device, as {mode.why}" if self.repeats_rows else ""
        self._bridge = self._made()

    @property
    def bridge(self) -> Bridge:
        """Return the bridge to and from the replicas."""
        self.renew()
        return self._bridge

    def renew(self) -> None:
        """Lead the bridge to the present homes, in their present precision."""
        if self._bridge.is_outdated or self._dtypes != self._dtypes_of_homes():
            self._bridge = self._made()

    def _dtypes_of_homes(self) -> list[torch.dtype]:
        return [home.dtype for home in self.homes.values()]

    def _made(self) -> Bridge:
        self._dtypes = self._dtypes_of_homes()
        with self.first_use.making():
            return self.compute.find_bridge([self._entry(name, home) for name, home in self.homes.items()])

    def _entry(self, name: str, home: nn.Parameter) -> BridgeEntry:
        """Every replica reads a copy, and has a summand of the gradient; all of it where it has run all rows."""
        copies = _on_replicas(self.plan)
        summands = Annotation.on(self.plan.devices, Partial(len(self.plan.devices)))
        gradient = copies if self.repeats_rows else summands
        trained = name in self.trained
        at_home = get_home_layout(home).annotation
        return BridgeEntry(name, tuple(home.shape), home.dtype, at_home, copies, gradient if trained else copies)

    def used_anywhere(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the trained parameters that are among some rank's `names`; collective.

        A module may leave out parts of itself in some steps.
        """
        trained = list(self.trained)
        flags = any_rank(self.table, [name in names for name in trained])
        return tuple(name for name, is_used in zip(trained, flags, strict=True) if is_used)


def _on_replicas(plan: Plan) -> Annotation:
    """Return the annotation of a parameter: whole on each of the plan's devices."""
    return Annotation.on(plan.devices, Duplicate(len(plan.devices)))


class EagerExecution:
    """Runs the module itself on every device: each on its share of the rows where that is right, else on all rows.

    Args:
        model: the user's.
        loss_fn: makes the loss of its output; None if the model does.
        example: a batch like those to come; tells which inputs have rows.
        row_dims: what the user has said of that.
        shared: every rank passes the same batch.

    Attributes:
        mode_of: how replicas share a batch under a plan, the same on all ranks.

    Raises:
        BatchError: the example has no rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        example: Batch,
        row_dims: AskedRowDims = NOTHING_ASKED,
        *,
        shared: bool = False,
    ) -> None:
        self.module = EagerModule(model, loss_fn, example, row_dims)
        self.loss_fn, self.observers, self._shared = loss_fn, Observers(model), shared
        self.mode_of: Callable[[Plan], RowMode] = lambda plan: NOT_KNOWN

    def variant(self, name: str, plan: Plan, compute: Compute, planned_rates: Mapping[int, float]) -> EagerVariant:
        """Return a variant; with several replicas rank 0 warns of what that means."""
        mode = self.mode_of(plan)
        if mode.by_rows and self.module.in_lists:
            mode = RowMode(False, why=f"{self._lists} may be a list of samples")
        made = EagerVariant(name, plan, compute, planned_rates, mode)
        if len(plan.pipelines) > 1 and made.table.rank == 0:
            said = self._whole_rows_text(made) if made.repeats_rows else _BY_ROWS_TEXT
            warn_user(said, LeafWarning if made.repeats_rows else UserWarning)
        return made

    def _whole_rows_text(self, variant: EagerVariant) -> str:
        size = bytes_text(self.module.row_bytes)
        gathered = "" if self._shared else f"; the rows of all ranks are gathered on each, {size} of the example's"
        return (
            f"capture='eager': each of {len(variant.plan.devices)} devices runs the module on all rows of the batch, "
            f"as {variant.mode.why}: each does the whole batch's work{gathered}\n{_CURE}"
        )

    @property
    def _lists(self) -> str:
        lists = dict.fromkeys(name.rpartition(".")[0] for name in self.module.in_lists)
        return "input " + " and ".join(map(repr, lists))

    @property
    def forward(self) -> Forward:
        """Return the module's own forward."""
        return self.module.forward

    def become(self, replaced: Forward | None) -> None:
        """Run what a script has put in the place of the module's forward; None: its class's."""
        if replaced is not self.module.replaced:
            self.module.become(replaced)

    @property
    def structure(self) -> Structure:
        """Return what the module consisted of when a batch was last read."""
        return self.module.structure

    def check_rows_are_known(self, ranks: int) -> None:
        """Refuse entries of lists of several ranks, each with its own: nobody knows how they are put together.

        They may be samples, and their dim 0 then no row of the batch.

        Raises:
            PlanError: naming them.
        """
        if (names := self.module.in_lists) and ranks > 1 and not self._shared:
            lists = dict.fromkeys(name.rpartition(".")[0] for name in names)
            raise PlanError(
                f"{self._lists} is a list of tensors, which capture='eager' cannot put together of several ranks: "
                f"dim 0 of each may count rows, or each may be a sample (an image of channels, height and width)\n"
                f"hint: say row_dims={dict.fromkeys(lists, 0)} if dim 0 of each counts rows. Else pass "
                f"samples as one padded tensor, or the same whole batch on all ranks, with data='global'"
            )

    def check(self, plan: Plan, world_size: int) -> None:
        """Raise PlanError unless every pipeline is one device and one micro-batch."""
        for index, pipeline in enumerate(plan.pipelines):
            if len(pipeline.devices) > 1 or pipeline.micro_batches > 1:
                raise PlanError(
                    f"pipelines[{index}] of the plan is {pipeline} in {pipeline.micro_batches} micro-batches, but "
                    f"capture='eager' runs the whole module on one device in one micro-batch\nhint: use "
                    f"hetu_fx.Plan.data_parallel(devices, shares) or plan='auto', or make the model capturable and use "
                    f"capture='graph'"
                )
            if any(stage.recompute for stage in pipeline.stages):
                raise PlanError(
                    f"pipelines[{index}] of the plan is {pipeline}, but capture='eager' runs the module as it is\n"
                    f"hint: leave 'recompute' out, and call torch.utils.checkpoint in the module's own forward"
                )
            if any(stage.dtype for stage in pipeline.stages):
                raise PlanError(
                    f"pipelines[{index}] of the plan is {pipeline}, but capture='eager' runs the module as it is\n"
                    f"hint: leave 'dtype' out, and use torch.autocast around the module"
                )
        if plan.zero == 3 and world_size > 1:
            raise PlanError(
                "the plan has zero 3, but capture='eager' calls the module itself, with all of its parameters\n"
                "hint: use zero 2"
            )
        check_takes_any_row(plan)
        plan.check(num_blocks=0, world_size=world_size)
        self.check_rows_are_known(world_size)

    def check_ops(self, plan: Plan) -> None:
        """Check nothing: the module runs as it is."""

    def compute_annotations(self, plan: Plan) -> Mapping[str, Annotation]:
        """Return that every replica reads all parameters."""
        return {name: _on_replicas(plan) for name, _ in self.module.model.named_parameters()}

    def deduced(self, plan: Plan, topology: Topology | None) -> bytes | None:
        """Return None: there is no graph."""
        return None

    def compute(
        self, plan: Plan, table: GroupTable, homes: Mapping[str, nn.Parameter], deduced: bytes | None = None
    ) -> Compute:
        """Return the way of parameters to replicas and back."""
        return Compute(table, homes)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, *, shared: bool) -> EagerReading:
        """Read the arguments of a call."""
        batch = self.module.read(args, kwargs, training)
        return EagerReading(batch.facts, batch, self.module)


@dataclass(frozen=True)
class EagerReading(Reading[EagerVariant]):
    """A batch of rows, as the module runs it. It is not rehearsed: what a forward does cannot be undone."""

    batch: EagerBatch
    module: EagerModule

    def same_inputs(self, *, shared: bool) -> Mapping[str, Tensor]:
        """Return the inputs that all ranks must pass alike."""
        return same_inputs(self.batch.tensors, self.batch.row_dims, shared=shared)

    def build(self, variant: EagerVariant, inputs: StepInputs) -> None:
        """Lead the bridge to the present homes."""
        variant.renew()

    def run(self, variant: EagerVariant, inputs: StepInputs) -> LossAndOutput:
        """Run it."""
        return _EagerStep(self.module, variant, self.batch, inputs).run()


class _EagerStep(StepFrame):
    """One step: read top to bottom in `run`."""

    variant: EagerVariant

    def __init__(self, module: EagerModule, variant: EagerVariant, batch: EagerBatch, inputs: StepInputs) -> None:
        super().__init__(
            variant,
            inputs,
            scale=share_of_loss(inputs, variant.table, adds_up=variant.mode.adds_up),
            gives_values=inputs.wants_values(has_loss=True, training=module.model.training),
            needing=batch.needing,
            row_dims=batch.row_dims,
        )
        self.module, self.batch = module, batch

    def run(self) -> LossAndOutput:
        rows = self.leaves_of(self._own_rows())
        parameters = self.parameters(self.variant.bridge)
        if self.trains and not self.is_direct:
            variant = self.variant  # what a collector has must not lead back to the step, which has the collector
            used = GradientUse(lambda here, _: variant.used_anywhere(here))
            collector = self.collector(self.variant.bridge, parameters, overlaps=True, used=used)
            collector.listen()
            parameters = collector.leaves
        self._share_buffers()
        with self._same_numbers():
            made, told = self._attempt(rows, parameters)
        forms = tell(self.table, told)
        if self.inputs.rows.repeats:
            check_same(forms, self._dtypes())
        form = common_form(forms)
        routes = self._routes(forms, form)
        local = self._local_loss(form, made) if form.loss_name else None
        pieces, local = self.outside({} if made is None else made.values, routes, local)
        values = self.own_outputs(routes, pieces, has_work=made is not None)
        tree = form.tree if values else loss_alone(form.tree, form.loss_name)
        if local is None:
            return LossAndOutput(None, unflatten(tree, values))
        loss = values[form.loss_name] = self.global_loss(local, made is not None and self._contributes)
        return LossAndOutput(loss, unflatten(tree, values))

    def _own_rows(self) -> dict[str, Tensor]:
        dims, shared = self.batch.row_dims, self.inputs.shared
        per_row = {name: self.batch.tensors[name] for name in dims}
        return rows_for_pipeline(per_row, dims, self.inputs.rows, self.variant.plan, self.table, shared=shared)

    def _share_buffers(self) -> None:
        """Let all ranks evaluate with the same buffers; in training each replica that has rows writes its own.

        Which of them it writes cannot be told: batch normalization does not count up a tensor's version.
        """
        model, buffers = self.module.model, self.inputs.buffers
        if model.training:
            pipelines = zip(self.variant.plan.pipelines, self.inputs.rows.pipelines, strict=True)
            ran = [pipeline.devices[0] for pipeline, rows in pipelines if rows]
            owners = ran if self.inputs.rows.repeats else ran[:1]
            buffers.mark_written((name for name, _ in model.named_buffers()), owners)
        else:
            buffers.sync()

    def _attempt(
        self, rows: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> tuple[EagerOutput | None, OutputForm | Exception | None]:
        """Run the module if this rank has rows; return what it made, and what the others are told of it."""
        if len(self.interval) == 0:
            self.inputs.stand_by()
            return None, None
        try:
            with self.inputs.timer:
                made = self.module.call(self.batch, rows, parameters)
            form = form_of_output(made, sized=self.inputs.rows.repeats)
        except Exception as error:  # whatever the user's code raises is told to all ranks, and raised by `tell`
            return None, error
        return made, form

    def _routes(self, forms: Mapping[int, OutputForm], form: OutputForm) -> tuple[ValueRoute, ...]:
        """Return the ways of the outputs other than the loss to this rank's rows, if they are wanted."""
        asked = self.inputs.wants_values(has_loss=bool(form.loss_name), training=self.module.model.training)
        if not asked and not self.inputs.has_values_at_hand(self.variant.plan):
            return ()
        dims, shared = self.batch.row_dims, self.inputs.shared
        try:
            return eager_routes(forms, dims, self.variant.plan, self.inputs.rows, shared=shared)
        except StateError:  # on all ranks
            if asked:
                raise
            return ()  # they say so when they are used

    def _local_loss(self, form: OutputForm, made: EagerOutput | None) -> Tensor:
        """Return what this replica has of the loss: of a mean by its share of the rows; zero where it has none."""
        if made is None or made.loss is None:
            return torch.zeros((), dtype=form.loss_dtype, device=self.variant.device)
        if self.inputs.rows.repeats or self.variant.mode.adds_up:
            return made.loss
        return made.loss * (len(self.interval) / self.inputs.rows.total)

    @property
    def _contributes(self) -> bool:
        """Whether the loss of this replica is added to the others': of replicas that have the same, one's is."""
        return not self.inputs.rows.repeats or self.table.rank == self.variant.plan.devices[0]

    @contextmanager
    def _same_numbers(self) -> Iterator[None]:
        """Let replicas that run the same rows draw the random numbers of the first; collective, where there are some.

        Those of the others are for what their scripts draw.
        """
        if not self.inputs.rows.repeats:
            yield
            return
        first, device = self.variant.plan.devices[0], self.variant.device
        numbers = broadcast(RandomNumbers.of(device) if self.table.rank == first else None, self.table, first)
        assert numbers is not None, "the first replica has told them"
        with nullcontext() if self.table.rank == first else numbers.drawn(device):
            yield

    def _dtypes(self) -> set[torch.dtype]:
        """Return in which dtypes the module may compute."""
        homes = {home.dtype for home in self.variant.homes.values() if is_real(home.dtype)}
        return homes | {dtype for _, dtype in ambient_autocasts()}
