"""What every step does on a rank, however the model runs: its rows, its gradients' way home, one loss, the outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hetu_fx.switching.bridge.bridge import Bridge
from hetu_fx.switching.step.execution import StepInputs
from hetu_fx.switching.step.gradients import Collector, UsedAnywhere
from hetu_fx.switching.step.loss import GlobalLoss, LossGradient, applied
from hetu_fx.switching.step.outputs import BringBack, ValueRoute, anchored
from hetu_fx.switching.step.variant import Variant


class StepFrame:
    """One step of one variant on this rank, around the part in which the model runs.

    Args:
        variant: runs the step.
        inputs: what the step needs besides the batch.
        scale: what the loss is multiplied by.
        may_run_ahead: in training, backward runs in forward, before the gradient of the loss is known.
    """

    def __init__(
        self, variant: Variant, inputs: StepInputs, *, scale: float = 1.0, may_run_ahead: bool = False
    ) -> None:
        self.variant, self.inputs, self.table = variant, inputs, variant.table
        place = variant.plan.place(self.table.rank)
        self.interval = range(0, 0) if place is None else inputs.rows.pipelines[place[0]]
        self.trains = torch.is_grad_enabled() and bool(variant.trained)
        self.runs_ahead = self.trains and may_run_ahead
        self._scale = scale
        self._loss_gradient = LossGradient(self.table, inputs.guess, 1.0 / scale if self.runs_ahead else None)
        self._anchor: Tensor | None = None

    def collector(
        self, bridge: Bridge, compute: Mapping[str, Tensor], *, overlaps: bool, used: UsedAnywhere | None = None
    ) -> Collector:
        """Make the compute tensors leaves of this step's autograd graph, before the model runs; once.

        See `Collector` for `overlaps` and `used`. Backward of what this rank returns ends in the collector.
        """
        made = Collector(
            self.variant,
            self.inputs,
            bridge,
            compute,
            loss_gradient=self._loss_gradient,
            ran_ahead=self.runs_ahead,
            overlaps=overlaps,
            used=used,
        )
        self._anchor = made.anchor()
        return made

    def global_loss(self, local: Tensor, contributes: bool) -> Tensor:
        """Return the loss of the whole batch from each rank's part, of those that contribute one."""
        if self._anchor is not None:
            local = local + self._anchor.to(local.dtype)
        loss: Tensor = applied(GlobalLoss, local, self._loss_gradient, contributes, self._scale, self.inputs.timer)
        return loss

    def hand_out(
        self, routes: tuple[ValueRoute, ...], values: Mapping[str, Tensor], *, has_work: bool, has_loss: bool
    ) -> dict[str, Tensor]:
        """Return the outputs that belong to this rank's rows; collective.

        A loss may be computed of them if there is none yet, whose gradient comes back then.

        Args:
            routes: of all outputs that are wanted.
            values: this rank's pieces by name.
            has_work: this rank had rows; without, its pieces are placeholders.
            has_loss: the model, or a loss_fn, has given a loss.
        """
        apart = self.trains and not has_loss
        if apart and self._anchor is not None:
            values = anchored(routes, values, self._anchor)
        returned: dict[str, Tensor] = {}
        for route in routes:
            piece = values.get(route.name, torch.zeros((), dtype=route.dtype))
            holds = route.source.holds(self.table.rank)
            if holds and (not has_work or route.name not in values):
                piece = route.without_rows(piece, self.table)
            piece = piece if apart else piece.detach()
            returned[route.name] = applied(BringBack, piece, holds, route, self.table, self.inputs.shared)
        return returned
