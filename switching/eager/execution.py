"""Run a model as the module it is, data parallel with uneven shares: for models that cannot be captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.program.captures import Batch
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.eager.module import EagerBatch, EagerModule
from hetu_fx.switching.eager.step import run_eager_step
from hetu_fx.switching.eager.variant import EagerVariant, on_replicas
from hetu_fx.switching.step.execution import Reading, StepInputs, StepOutputs, check_takes_any_row

BY_ROWS = (
    "capture='eager' with several replicas: each replica's loss is weighted by its share of the rows. That is exact "
    "for a mean over rows; a mean over tokens, of which rows have unequal numbers, or a loss divided by a given number "
    "differs from that of one device, as the module does not tell what it divides by. What the forward works out from "
    "all rows (batch statistics), it works out from each replica's own"
)


class EagerExecution:
    """Runs the module itself on every device, each on its share of the rows.

    Args:
        model: the user's.
        loss_fn: makes the loss of its output; None if the model does.
        example: a batch like those to come; tells which inputs have rows.

    Raises:
        BatchError: the example has no rows.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, example: Batch) -> None:
        self.module = EagerModule(model, loss_fn, example)
        self.forward, self.loss_fn = self.module.forward, loss_fn

    def check(self, plan: Plan, world_size: int) -> None:
        """Raise PlanError unless every pipeline is one device and one micro-batch; warn of what rows weigh."""
        for index, pipeline in enumerate(plan.pipelines):
            if len(pipeline.devices) > 1 or pipeline.micro_batches > 1:
                raise PlanError(
                    f"pipelines[{index}] of the plan is {_told(pipeline)}, but capture='eager' runs the whole module "
                    f"on one device in one micro-batch; use hetu_fx.Plan.data_parallel(devices, shares) or plan='auto'"
                    f", or make the model capturable and use capture='graph'"
                )
            if any(stage.recompute for stage in pipeline.stages):
                raise PlanError(
                    f"pipelines[{index}] of the plan is {pipeline}, but capture='eager' runs the module as it is; "
                    f"leave 'recompute' out, and call torch.utils.checkpoint in the module's own forward"
                )
        check_takes_any_row(plan)
        plan.check(num_blocks=0, world_size=world_size)
        if len(plan.pipelines) > 1:
            warnings.warn(BY_ROWS, stacklevel=2)

    def compute_annotations(self, plan: Plan) -> Mapping[str, Annotation]:
        """Return that every replica reads all parameters."""
        return {name: on_replicas(plan) for name, _ in self.module.model.named_parameters()}

    def deduced(self, plan: Plan, topology: Topology | None) -> bytes | None:
        """Return None: there is no graph."""
        return None

    def variant(
        self,
        name: str,
        plan: Plan,
        table: GroupTable,
        homes: Mapping[str, nn.Parameter],
        planned_rates: Mapping[int, float],
        twin: EagerVariant | None = None,
        deduced: bytes | None = None,
    ) -> EagerVariant:
        """Make the bridge between home and the plan's replicas."""
        compute = Compute(table, homes) if twin is None else twin.compute
        return EagerVariant(name, plan, compute, planned_rates)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Reading[EagerVariant]:
        """Read the arguments of a call."""
        batch = self.module.read(args, kwargs, training)
        return Reading(batch.facts, partial(_run, self.module, batch), lambda variant, _: variant.bridge)


def _run(module: EagerModule, batch: EagerBatch, variant: EagerVariant, inputs: StepInputs) -> StepOutputs:
    return run_eager_step(module, variant, batch, inputs)


def _told(pipeline: Pipeline) -> str:
    return f"{pipeline} in {pipeline.micro_batches} micro-batches"
