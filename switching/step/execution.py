"""How a model runs, as far as the runtime needs to know: as captured graphs, or as the module it is."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.wire.consensus import Count, LocalFacts, StepFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.assignment import BatchPlan
from hetu_fx.plans.plan import Plan
from hetu_fx.program.observed import Observers
from hetu_fx.program.structure import Structure
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.step.loss import PredictedLossGrad
from hetu_fx.switching.step.rows import RowPlan
from hetu_fx.switching.step.timer import ComputeTimer, HostTime
from hetu_fx.switching.step.variant import Variant

V = TypeVar("V", bound=Variant)


def check_takes_any_row(plan: Plan, length: int | None = None) -> None:
    """Raise `PlanError` for pipelines that do not take rows of a length (None: of any).

    Rows go to pipelines by share; sequences of a batch of mixed lengths go by their own.
    """
    limits = {i: p.max_length for i, p in enumerate(plan.pipelines) if p.max_length is not None}
    limited = {i: most for i, most in limits.items() if length is None or most < length}
    if limited:
        raise PlanError(
            f"pipelines take sequences up to a length of their own, {limited} by index, but rows are handed out by "
            f"shares, whatever their length{'' if length is None else f' of {length}'}\nhint: give a plan all of whose "
            f"pipelines take them (without max_length), or pass sequences of mixed lengths as nested tensors"
        )


@dataclass(frozen=True)
class StepInputs:
    """What a step needs besides the batch; see `Runtime` for where it comes from.

    Attributes:
        counts: global counts, in the order of the batch's local ones.
        rows: which rows each rank brings and each pipeline takes.
        step: number of the training step.
        seed: of the numbers that graphs draw.
        draw: tells apart what calls draw: the step, or a negative number for a call that trains nothing.
        buffers: of the model.
        shared: every rank passes the same batch.
        outputs: which outputs are wanted: "auto", "all" or "loss".
        syncs_gradients: gradients go home in this step; otherwise they are kept for a later one.
        guess: what the gradient of the loss will be.
        timer: to run while this rank computes, in backward too.
        host: to count this rank's own calls, in backward too.
        stand_by: what a rank without work does while the others compute.
        tell: takes what observed submodules have made, by their names.
    """

    counts: tuple[Count, ...]
    rows: RowPlan
    step: int
    seed: int
    draw: int
    buffers: Buffers
    shared: bool
    outputs: str
    syncs_gradients: bool
    guess: PredictedLossGrad
    timer: ComputeTimer
    host: HostTime
    stand_by: Callable[[], None]
    tell: Callable[[dict[str, Any]], None]

    def wants_values(self, *, has_loss: bool, training: bool) -> bool:
        """Tell whether other outputs than the loss are wanted: always where there is none."""
        return wants_values(self.outputs, has_loss=has_loss, training=training)

    def has_values_at_hand(self, plan: Plan) -> bool:
        """Tell whether outputs come back without being asked for: each replica has them, and its own rows."""
        is_own = len(self.rows.owned) == 1 or not self.shared
        return self.outputs == "auto" and plan.is_data_parallel and is_own


def wants_values(outputs: str, *, has_loss: bool, training: bool) -> bool:
    """Tell whether other outputs than the loss are wanted: always where there is none."""
    return not has_loss or outputs == "all" or (outputs == "auto" and not training)


class LossAndOutput(NamedTuple):
    """What a step returns on this rank, and a model with a loss_fn to its caller where there is a loss.

    The loss is that of the whole batch, None if there is none: then the caller gets the output alone. The output is as
    the model returns it, None in the place of objects, and a tensor that was not brought back says so when it is used.
    """

    loss: Tensor | None
    output: Any


Run = Callable[[V, StepInputs], LossAndOutput]
Work = Callable[[Cluster], Mapping[int, float]]


@dataclass(frozen=True)
class VariantPart(Generic[V]):
    """A part of a step that one variant runs: its name, the rows, and how it runs them (collective)."""

    variant: str
    rows: RowPlan
    run: Run[V]


@dataclass(frozen=True)
class Division(Generic[V]):
    """A batch, divided into parts that run one after another: their losses and gradients add up.

    Rows are one part. Attributes after `counts` are those of sequences of mixed lengths.

    Attributes:
        parts: in the order in which they run.
        counts: those of the whole batch.
        output: makes what the model returns of the loss.
        planned: what all parts together are expected to take, and what planning them took.
        work: the compute seconds that each of these devices is expected to take while it is healthy.
    """

    parts: tuple[VariantPart[V], ...]
    counts: tuple[Count, ...]
    output: Callable[[Tensor], Any] | None = None
    planned: BatchPlan | None = None
    work: Work | None = None

    def joined(self, made: Sequence[LossAndOutput]) -> LossAndOutput:
        """Return the outputs of the whole batch from those of its parts."""
        if self.output is None:
            return made[0]
        loss = functools.reduce(operator.add, [part.loss for part in made if part.loss is not None])
        return LossAndOutput(loss, self.output(loss))


@dataclass(frozen=True)
class Reading(ABC, Generic[V]):
    """A batch that has been read, and what the other ranks must know of it; what runs it is collective."""

    facts: LocalFacts

    def filled(self, facts: StepFacts, outputs: str) -> Reading[V]:
        """Return it with the sizes that all ranks have agreed on; `outputs` as in `StepInputs`.

        Raises:
            BatchError: on every rank, where sizes differ and cannot be made alike.
        """
        return self

    def takes(self, rows: int) -> bool:
        """Tell whether it can be a part of so many rows, those of all ranks; alike on them, unless one's facts ask."""
        return True

    def of_rows(self, rows: int) -> Reading[V]:
        """Return it read anew, as a part of so many rows.

        Raises:
            HetuFxError: the model does not take so many.
        """
        return self

    def same_inputs(self, *, shared: bool) -> Mapping[str, Tensor]:
        """Return the inputs that all ranks must pass alike, but numbers: all, where the batch is `shared`."""
        return {}

    @abstractmethod
    def build(self, variant: V, inputs: StepInputs) -> None:
        """Make what a variant lacks to run it."""

    def rehearse(self, variant: V, inputs: StepInputs) -> None:
        """Run it on a variant and leave no trace; nothing where that cannot be."""

    def divide(self, variants: Sequence[V], rates: Mapping[int, float]) -> Division[V] | None:
        """Divide it among variants, on devices of these straggling rates; None for rows, which one variant runs."""
        return None

    def run(self, variant: V, inputs: StepInputs) -> LossAndOutput:
        """Run it on a variant, unless it is to be divided."""
        raise NotImplementedError


class Execution(Protocol[V]):
    """A way of running one model; made from an example batch, alike on all ranks.

    Attributes:
        forward: the model's own forward.
        loss_fn: makes the loss of its output; None if the model does.
        observers: of the model's submodules.
    """

    observers: Observers
    loss_fn: Callable[..., Any] | None

    @property
    def structure(self) -> Structure:
        """Return what the model consisted of when a batch was last read."""

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the model's own forward."""

    def become(self, replaced: Callable[..., Any] | None) -> None:
        """Run what a script has put in the place of the model's forward; None: its class's."""

    def check(self, plan: Plan, world_size: int) -> None:
        """Raise PlanError unless the plan fits the model and the world; ops are not looked at."""

    def check_ops(self, plan: Plan) -> None:
        """Raise HetuFxError unless all that the model computes can run under the plan; one rank asks for all."""

    def compute_annotations(self, plan: Plan) -> Mapping[str, Annotation]:
        """Return where the plan reads each parameter, by name; those that it never reads are left out."""

    def deduced(self, plan: Plan, topology: Topology | None) -> bytes | None:
        """Return what is found out of a plan before any rank can run it, as bytes; None where that is nothing.

        It takes a while, and depends on no rank: another process can do it, while this one trains.
        """

    def compute(
        self, plan: Plan, table: GroupTable, homes: Mapping[str, nn.Parameter], deduced: bytes | None = None
    ) -> Compute:
        """Return what runs under the plan's compute layout, and makes its graphs when a batch first needs them.

        `deduced` is what `deduced` has returned for the plan, here or in another process.
        """

    @property
    def variant(self) -> Callable[[str, Plan, Any, Mapping[int, float]], V]:
        """What makes a variant of a name, a plan, what runs under its layout, and the rates it was planned for."""

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, *, shared: bool) -> Reading[V]:
        """Read the arguments of a call of the model, `shared` where every rank passes the same ones.

        Raises HetuFxError if they do not fit the model.
        """
