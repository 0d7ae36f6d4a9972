"""Run one step of the module as it is on this rank: rows here, parameters here, forward, one loss for all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hetu_fx.graph.containers import unflatten
from hetu_fx.switching.eager.module import EagerBatch, EagerModule, EagerOutput
from hetu_fx.switching.eager.outputs import OutputForm, common_form, eager_routes, form_of_output, tell
from hetu_fx.switching.eager.variant import EagerVariant, UsedOnly
from hetu_fx.switching.step.execution import StepInputs, StepOutputs
from hetu_fx.switching.step.loss import GlobalLoss, LossGradient, applied
from hetu_fx.switching.step.outputs import anchored, hand_out
from hetu_fx.switching.step.row_exchange import rows_for_pipeline
from hetu_fx.switching.step.rows import Interval


def run_eager_step(module: EagerModule, variant: EagerVariant, batch: EagerBatch, inputs: StepInputs) -> StepOutputs:
    """Run one step; collective over the world."""
    return _EagerStep(module, variant, batch, inputs).run()


class _EagerStep:
    """One step: read top to bottom in `run`."""

    def __init__(self, module: EagerModule, variant: EagerVariant, batch: EagerBatch, inputs: StepInputs) -> None:
        self.module, self.variant, self.batch, self.inputs = module, variant, batch, inputs
        self.table, self.plan = variant.table, variant.plan
        self.interval = self._own_interval()
        self.trains = torch.is_grad_enabled() and bool(variant.trained)
        self.timer = inputs.timer
        self.loss_gradient = LossGradient(self.table, inputs.guess)

    def run(self) -> StepOutputs:
        rows = self._own_rows()
        parameters = self.variant.compute.gather(self.variant.bridge)
        anchor: Tensor | None = None
        if self.trains:
            collector = UsedOnly(
                self.variant,
                parameters,
                syncs=self.inputs.syncs_gradients,
                loss_gradient=self.loss_gradient,
                timer=self.timer,
            )
            parameters, anchor = collector.leaves, collector.anchor()
        self._share_buffers()
        made, told = self._attempt(rows, parameters)
        forms = tell(self.table, told)
        form = common_form(forms)
        values = self._values(forms, form, made, anchor)
        loss = self._loss(form, made, anchor) if form.loss_name else None
        if loss is not None:
            values[form.loss_name] = loss
        return StepOutputs(unflatten(form.tree, values), loss)

    def _own_interval(self) -> Interval:
        place = self.plan.place(self.table.rank)
        return Interval(0, 0) if place is None else self.inputs.rows.pipelines[place[0]]

    def _own_rows(self) -> dict[str, Tensor]:
        per_row = {name: self.batch.tensors[name] for name in self.batch.row_inputs}
        return rows_for_pipeline(per_row, self.inputs.rows, self.plan, self.table, shared=self.inputs.shared)

    def _share_buffers(self) -> None:
        """Let all ranks evaluate with the same buffers; in training each replica writes its own.

        Which of them it writes cannot be told: batch normalization does not count up a tensor's version.
        """
        model, buffers = self.module.model, self.inputs.buffers
        if model.training:
            buffers.mark_written((name for name, _ in model.named_buffers()), self.plan.devices[0])
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
            with self.timer:
                made = self.module.call(self.batch, rows, parameters)
        except Exception as error:  # whatever the user's code raises is told to all ranks, and raised by `tell`
            return None, error
        return made, form_of_output(made)

    def _values(
        self, forms: Mapping[int, OutputForm], form: OutputForm, made: EagerOutput | None, anchor: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the outputs other than the loss that belong to this rank's rows."""
        training = self.module.model.training
        if not self.inputs.wants_values(has_loss=bool(form.loss_name), training=training):
            return {}
        routes = eager_routes(forms, self.plan, self.inputs.rows, shared=self.inputs.shared)
        values = {} if made is None else made.values
        apart = anchor is not None and not form.loss_name
        if anchor is not None and apart:
            values = anchored(routes, values, anchor)
        return hand_out(
            routes, values, self.table, shared=self.inputs.shared, has_work=made is not None, differentiable=apart
        )

    def _loss(self, form: OutputForm, made: EagerOutput | None, anchor: Tensor | None) -> Tensor:
        """Return the mean over all rows, from each replica's mean over its own."""
        share = len(self.interval) / self.inputs.rows.total
        if made is None or made.loss is None:
            local = torch.zeros((), dtype=form.loss_dtype, device=_device(self.module.model))
        else:
            local = made.loss * share
        if anchor is not None:
            local = local + anchor.to(local.dtype)
        loss: Tensor = applied(GlobalLoss, local, self.loss_gradient, made is not None, 1.0, self.timer)
        return loss


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
