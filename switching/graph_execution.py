"""Run a model as captured graphs: steps of training, and rehearsals, whose results are thrown away.

A rehearsal makes process groups, compiled code and memory pools ahead of training. Hydraulis runs every strategy once
before it measures, for the same reasons (its artifact's warm-up).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.device_types import CPU, device_type_record
from hetu_fx.base.torch_private import tree_leaves
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import DeductionError, PlanError
from hetu_fx.graph.bind import Batch
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program, deduce_program, deduction_weights
from hetu_fx.program.structure import Structure
from hetu_fx.program.tracer import Forward
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.sequences.reader import SequenceReader
from hetu_fx.switching.step.assigned_rows import nested_sequences
from hetu_fx.switching.step.batches import ReadBatch, read_batch, same_inputs
from hetu_fx.switching.step.compiled_plans import GraphCompute, GraphVariant
from hetu_fx.switching.step.execution import LossAndOutput, Reading, Run, StepInputs, wants_values
from hetu_fx.switching.step.filling import Fillings
from hetu_fx.switching.step.graph_step import find_stage
from hetu_fx.switching.step.loss import PredictedLossGrad
from hetu_fx.switching.step.run import run_step
from hetu_fx.switching.step.variant import DeferredGradients
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.serialize import serialize
from hetu_fx.transforms.layouts.shardings import StageShardings
from hetu_fx.transforms.lowering.lower import check_backend
from hetu_fx.transforms.passes import run_pass


class GraphExecution:
    """Captures a model when a form of batch first needs it, and runs device graphs made from that.

    Args:
        programs: captures the model.
        example: a batch like those to come.
        backend: what compiles device graphs; None runs them eagerly.
        replays: what a device computes is recorded and replayed, where it can be.

    Raises:
        CaptureError: the model cannot be captured.
    """

    variant = GraphVariant

    def __init__(self, programs: Programs, example: Batch, backend: Any, *, replays: bool = False) -> None:
        check_backend(backend)
        self.programs, self.backend, self.replays = programs, backend, replays
        self.sequences = SequenceReader(programs)
        self.loss_fn, self.observers = programs.loss_fn, programs.observers
        self.fillings = Fillings(programs.model)
        programs.first(example, training=True)

    @property
    def forward(self) -> Forward:
        """Return the model's own forward."""
        return self.programs.forward

    def become(self, replaced: Forward | None) -> None:
        """Run what a script has put in the place of the model's forward; None: its class's."""
        if replaced is not self.programs.replaced:
            self.programs.become(replaced)

    @property
    def program(self) -> Program:
        """Return the program that was last asked for in training mode."""
        return self.programs.training

    @property
    def structure(self) -> Structure:
        """Return what the model consisted of when a program was last asked for."""
        return self.programs.structure

    def check(self, plan: Plan, world_size: int) -> None:
        """Raise PlanError unless the plan fits the model's blocks and the world."""
        plan.check(num_blocks=self.programs.num_blocks, world_size=world_size)
        if plan.gathers_units and world_size > 1:
            self._check_gathers_units(plan)

    def _check_gathers_units(self, plan: Plan) -> None:
        dtype = next((stage.dtype for *_, stage in plan.stages if stage.dtype), None)
        if self.replays:
            raise PlanError(
                "the plan has zero 3, under which parameters are gathered again and again, but cuda_graphs=True needs "
                "them where they were\nhint: use zero 2, or leave cuda_graphs out"
            )
        if dtype is not None:
            raise PlanError(
                f"the plan has zero 3 and stages of dtype {dtype!r}, whose casts of all parameters would stay for "
                f"backward\nhint: use zero 2, or cast the model itself"
            )

    def check_ops(self, plan: Plan) -> None:
        """Raise PlanError or DeductionError unless all ops can run under the plan."""
        with self._doubted() as program:
            deduced = deduce_program(program, plan, wants_values=not program.loss_name)
            for leaf in deduced.parameters():
                deduced.parameter_annotations(leaf)

    def compute_annotations(self, plan: Plan) -> Mapping[str, Annotation]:
        """Return where the plan's stages read each parameter."""
        with self._doubted() as program:
            annotated = run_pass(Annotate(plan, wants_values=not program.loss_name), program.analysed)
            return StageShardings(annotated).parameters_read()

    @contextmanager
    def _doubted(self) -> Iterator[Program]:
        """Give the program that holds for the model; errors also say what is doubted of it."""
        program = self.program if self.programs.holds(self.program) else self.programs.current
        assert program is not None, "a batch has been read"
        try:
            yield program
        except (PlanError, DeductionError) as error:
            if program.doubt:
                raise type(error)(f"{error}\n{program.doubt}") from error
            raise

    def deduced(self, plan: Plan, topology: Topology | None) -> bytes | None:
        """Return the plan's deduced graph for training, as bytes."""
        deduce = Deduce(topology, *deduction_weights(self.program))
        deduced = deduce_program(self.program, plan, wants_values=False, deduce=deduce)
        made = serialize(deduced, self.program.graph, self.program.factors, self.program.flow)
        return self.programs.name(self.program).encode() + made

    def compute(
        self, plan: Plan, table: GroupTable, homes: Mapping[str, nn.Parameter], deduced: bytes | None = None
    ) -> GraphCompute:
        """Return what makes the device graphs of the plan's layout."""
        if plan.zero == 3 and not plan.gathers_units and table.rank == 0:
            warn_user(
                f"zero 3 under pipelines of several stages or micro-batches keeps parameters gathered for the whole "
                f"step, as zero 2 does: {plan.summary()}",
            )
        made = GraphCompute(table, homes, plan, self.backend, replays=self.replays)
        name = self.programs.name(self.program).encode()
        if deduced is not None and deduced.startswith(name):  # else the model has changed since
            made.expect(self.program, deduced.removeprefix(name))
        return made

    def read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, *, shared: bool
    ) -> Reading[GraphVariant]:
        """Read the arguments of a call, and capture the model if they have a form not seen yet."""
        given = self.programs.batch(args, kwargs)
        sequences = nested_sequences(given)
        if sequences is not None:
            return self.sequences.read(sequences, training, shared=shared)
        read = partial(read_batch, given, self.programs, training, shared=shared)
        batch = read()
        return RowReading(batch.facts, batch, self.fillings, read)


@dataclass(frozen=True)
class RowReading(Reading[GraphVariant]):
    """A batch of rows, as graphs run it."""

    batch: ReadBatch
    fillings: Fillings
    read: Callable[..., ReadBatch]

    def takes(self, rows: int) -> bool:
        """Tell whether its program holds for so many rows."""
        return self.batch.program.takes_rows(self.batch.bindings, rows)

    def of_rows(self, rows: int) -> RowReading:
        """Return it with the program that holds for so many rows."""
        batch = self.read(rows=rows)
        return replace(self, facts=batch.facts, batch=batch)

    def filled(self, facts: StepFacts, outputs: str) -> RowReading:
        """Return it filled up to the longest rows of all ranks."""
        program = self.batch.program
        wanted = wants_values(outputs, has_loss=bool(program.loss_name), training=program.graph.training)
        wanted = wanted or program.graph.observed is not None
        return replace(self, batch=self.fillings.filled(self.batch, facts, wants_values=wanted))

    def same_inputs(self, *, shared: bool) -> Mapping[str, Tensor]:
        """Return the inputs that all ranks must pass alike, and the graph's own tensors (the weights of a loss_fn)."""
        program = self.batch.program
        constants = {f"constant {name}": tensor for name, tensor in program.graph.constants.items()}
        return same_inputs(self.batch.tensors, program.row_dims, shared=shared) | constants

    def build(self, variant: GraphVariant, inputs: StepInputs) -> None:
        """Make the variant's graphs."""
        find_stage(variant, self.batch, inputs)

    def rehearse(self, variant: GraphVariant, inputs: StepInputs) -> None:
        """Run it and leave no trace."""
        rehearse(variant, inputs, self.run)

    def run(self, variant: GraphVariant, inputs: StepInputs) -> LossAndOutput:
        """Run it."""
        return run_step(self.batch, variant, inputs)


class ReadOnly(Buffers):
    """Buffers that a rehearsal reads, and does not write."""

    def write(self, updates: Mapping[str, Tensor], annotations: Mapping[str, Annotation]) -> None:
        """Leave the model's buffers as they are."""


def rehearse(variant: GraphVariant, inputs: StepInputs, run: Run[GraphVariant]) -> None:
    """Run a step forward and backward, and leave the model as it is; collective.

    Gradients go to stand-ins of the home parameters, so that neither `.grad` nor hooks of the user's see them.
    """
    stand_in = copy.copy(variant)
    stand_in.homes = {name: _twin(home) for name, home in variant.homes.items()}
    stand_in.kept_back = DeferredGradients()
    buffers = ReadOnly(inputs.buffers.model, inputs.buffers.table)
    with _random_states_kept(variant.device):
        made = run(stand_in, replace(inputs, buffers=buffers, guess=PredictedLossGrad(), syncs_gradients=True))
        ends = list(_differentiable(tree_leaves(made.output) if made.loss is None else [made.loss]))
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Give the host's generator and that of a device their states back."""
    kinds = {kind.name: kind for kind in (CPU, device_type_record(device))}.values()
    before = [(kind, kind.random_state()) for kind in kinds]
    try:
        yield
    finally:
        for kind, state in before:
            if state is not None:
                kind.set_random_state(state)


def _twin(home: nn.Parameter) -> nn.Parameter:
    twin: nn.Parameter = home.detach().requires_grad_(home.requires_grad)  # type: ignore[assignment]
    return twin


def _differentiable(values: Iterable[object]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.requires_grad)
