"""What every step does on a rank, however the model runs: its rows, its gradients' way home, one loss, the outputs.

Outputs other than the loss go back to the ranks whose rows they belong to, their gradients the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, cotangent
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.program.program import Bindings, evaluate
from hetu_fx.switching.bridge.bridge import Bridge
from hetu_fx.switching.step.execution import StepInputs
from hetu_fx.switching.step.gradients import Collector, UsedAnywhere
from hetu_fx.switching.step.loss import GlobalLoss, LossGradient, applied
from hetu_fx.switching.step.rows import RowPlan, at_pipelines, at_ranks, move_tensor
from hetu_fx.switching.step.variant import Variant
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.states import Summed


@dataclass(frozen=True)
class ValueRoute:
    """How one output goes from the stages that make it to the ranks that asked for it; the same on all ranks.

    Attributes:
        name: the output's name.
        source, target: where it lies before and after.
        shape: its global shape in this step.
        dtype: its dtype.
        rows_dim: the dim that counts rows; None if there is none.
        summed: it is a sum over rows, so that pipelines and micro-batches have summands of it.
    """

    name: str
    source: Annotation
    target: Annotation
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_dim: int | None
    summed: bool = False

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return what a pipeline has made of its micro-batches' pieces; at least one."""
        if self.summed:
            return torch.stack(list(pieces)).sum(0)
        return pieces[-1] if self.rows_dim is None else torch.cat(list(pieces), self.rows_dim)

    def without_rows(self, zero: Tensor, table: GroupTable) -> Tensor:
        """Return what a rank of the source gives that had no rows: the 0-d `zero` made as large as its part.

        That is an empty tensor for rows, a summand of zeros for a sum over rows.
        """
        return zero.expand([size for size in self.source.local_shape(table.rank, self.shape) if size is not None])


def value_routes(deduced: DeducedGraph, rows: RowPlan, bindings: Bindings, *, shared: bool) -> tuple[ValueRoute, ...]:
    """Return the routes of all outputs of a step."""
    graph = deduced.annotated.graph
    symbol = graph.batch_symbol
    sizes = {**bindings, **{rows_of: rows.total for rows_of in (symbol, graph.all_rows) if rows_of is not None}}
    routes = []
    for leaf, node in graph.outputs_of(OutputKind.VALUE):
        rows_dim = deduced.annotated.factors.row_dim(node)
        layouts = [
            stages[deduced.annotated.stage_of[p].get(node, len(stages) - 1)]
            for p, stages in enumerate(deduced.annotated.stages)
        ]
        shardings = [deduced.sharding(node, deduced.states(node, at), at) for at in layouts]
        summed = isinstance(deduced.batch.states.get(node), Summed)
        source = at_pipelines([at.devices for at in layouts], shardings, rows_dim, rows, summed=summed)
        shape = evaluate(tuple(meta.expression(size) for size in meta.shape(node)), sizes)
        target = at_ranks(rows, rows_dim, shared=shared)
        routes.append(ValueRoute(leaf.name, source, target, shape, meta.dtype(node), rows_dim, summed))
    return tuple(routes)


def _anchored(routes: tuple[ValueRoute, ...], values: Mapping[str, Tensor], anchor: Tensor) -> dict[str, Tensor]:
    """Make every output depend on the anchor, also on ranks that computed nothing."""
    held: dict[str, Tensor] = {}
    for route in routes:
        value = values.get(route.name)
        if route.dtype.is_floating_point:
            held[route.name] = (value if value is not None else 0.0) + anchor.to(route.dtype)
        elif value is not None:
            held[route.name] = value
    return held


def _with_summed_copies(target: Annotation) -> Annotation:
    """Return where the gradient of an output lies: ranks that have a copy of it each have a summand."""
    axes = [Partial(axis.ways) if isinstance(axis, Duplicate) else axis for axis in target.shardings[0].axes]
    return Annotation.on(target.ranks, *axes)


class BringBack(torch.autograd.Function):
    """One output to the ranks that asked for it; its gradient back to the stage that made it.

    The gradient is divided by the number of ranks, as each rank has a loss of its own and their mean is trained on;
    with shared rows all ranks have the same loss, and each keeps its own rows' gradient.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, holds: bool, route: ValueRoute, table: GroupTable, shared: bool) -> Tensor:
        """Return the rows that this rank asked for; `piece` is a placeholder if it `holds` none."""
        ctx.route, ctx.table, ctx.shared, ctx.holds = route, table, shared, holds
        ctx.like = piece
        own = piece.detach() if holds else None
        moved = move_tensor(own, route.source, route.target, route.shape, route.dtype, table)
        assert moved is not None, "every rank is a target"
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Move the gradient back."""
        route: ValueRoute = ctx.route
        share = 1.0 if ctx.shared or ctx.table.size == 1 else 1.0 / ctx.table.size
        back = move_tensor(
            (gradient * share).contiguous(),
            route.target if ctx.shared else _with_summed_copies(route.target),
            cotangent(route.source),
            route.shape,
            route.dtype,
            ctx.table,
        )
        return (back if ctx.holds else torch.zeros_like(ctx.like), None, None, None, None)


class StepFrame:
    """One step of one variant on this rank, around the part in which the model runs.

    Args:
        variant: runs the step.
        inputs: what the step needs besides the batch.
        scale: what the loss is multiplied by.
        may_run_ahead: in training, backward runs in forward, before the gradient of the loss is known.
        in_float16: gradients may be of float16, so that backward must run with what the loss is scaled by.
    """

    def __init__(
        self,
        variant: Variant,
        inputs: StepInputs,
        *,
        scale: float = 1.0,
        may_run_ahead: bool = False,
        in_float16: bool = True,
    ) -> None:
        self.variant, self.inputs, self.table = variant, inputs, variant.table
        place = variant.plan.place(self.table.rank)
        self.interval = range(0, 0) if place is None else inputs.rows.pipelines[place[0]]
        self.trains = torch.is_grad_enabled() and bool(variant.trained)
        self.runs_ahead = self.trains and may_run_ahead
        self._scale = scale
        self.root = inputs.guess.value * scale if in_float16 else 1.0  # what a backward that runs ahead begins with
        ran_with = self.root / scale if self.runs_ahead else None
        self._loss_gradient = LossGradient(self.table, inputs.guess, ran_with, exact=in_float16)
        self._anchor: Tensor | None = None

    def collector(
        self, bridge: Bridge, compute: Mapping[str, Tensor], *, overlaps: bool, used: UsedAnywhere | None = None
    ) -> Collector:
        """Make the compute tensors leaves of this step's autograd graph, before the model runs; once.

        See `Collector` for `overlaps` and `used`. Backward of what this rank returns ends in the collector.
        """
        overlaps = overlaps and not (self.runs_ahead and self._loss_gradient.exact)
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
            values = _anchored(routes, values, self._anchor)
        returned: dict[str, Tensor] = {}
        for route in routes:
            piece = values.get(route.name, torch.zeros((), dtype=route.dtype))
            holds = route.source.holds(self.table.rank)
            if holds and (not has_work or route.name not in values):
                piece = route.without_rows(piece, self.table)
            piece = piece if apart else piece.detach()
            returned[route.name] = applied(BringBack, piece, holds, route, self.table, self.inputs.shared)
        return returned
