"""One step of one variant on this rank: `run_step` is its table of contents."""

from __future__ import annotations

from hetu_fx.switching.step.compiled_plans import GraphVariant
from hetu_fx.switching.step.execution import LossAndOutput, StepInputs
from hetu_fx.switching.step.graph_step import GraphStep, StepBatch, without_autocast


def run_step(batch: StepBatch, variant: GraphVariant, inputs: StepInputs) -> LossAndOutput:
    """Run one step, from facts that all ranks have agreed on to a loss and outputs; collective over the world.

    Each act is the same on all ranks, also on those without rows or without a stage. Gradients come home when the user
    calls `backward`: under a pipeline's schedule they are made in `run_graphs` already.

    Raises:
        BatchError: rows that the graph does not hold for, or cannot be put together; on every rank.
        StateError: the plan needs a loss of the model, which returns none.
    """
    with without_autocast():
        step = GraphStep(variant, batch, inputs)  # finds, or makes, this rank's graphs
        micro_batches = step.cut_micro_batches()  # brings rows to the pipelines that run them
        parameters = step.gather_parameters()  # from their homes, whole or unit by unit
        made = step.run_graphs(micro_batches, parameters)
        step.raise_checks()  # what the forward raises for rows of any rank
        step.write_buffers()  # running statistics, counters
        values, local_loss = step.tie_to_autograd(made)
        outputs = step.return_outputs(values)  # to the ranks whose rows they are of, and to observers
        loss = step.sum_loss(local_loss)
        return step.rebuild(loss, outputs)  # as the model returns them
