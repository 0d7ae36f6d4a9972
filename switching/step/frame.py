"""What every step does on a rank, however the model runs: its rows, its gradients' way home, one loss, the outputs.

Outputs other than the loss go back to the ranks whose rows they belong to, their gradients the other way.

Where the user's graph of autograd ends and that of a step begins. What a step returns depends, for the user's autograd,
on the home parameters and on the inputs that need a gradient, by one node. Its backward goes through the step's own
graph, brings the parameters' gradients home, and gives all of them to the user's autograd. So `torch.autograd.grad`,
`backward(inputs=...)`, `retain_graph` and hooks do what they do for a module on one device, whatever ranks do in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Sharding, cotangent
from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import accumulates_into_leaves, at_end_of_backward, gradient_hooks, keeps_graph
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import OutputKind
from hetu_fx.graph.row_dims import RowDims, with_rows
from hetu_fx.program.program import Bindings, evaluate
from hetu_fx.switching.bridge.bridge import Bridge
from hetu_fx.switching.step.execution import StepInputs
from hetu_fx.switching.step.gradients import Collector, take_gradient
from hetu_fx.switching.step.loss import GlobalLoss, LossGradient, apply_outside_transforms
from hetu_fx.switching.step.rows import RowPlan, at_pipelines, at_ranks, move_tensor
from hetu_fx.switching.step.timer import ComputeTimer
from hetu_fx.switching.step.unit_walk import UnitWalk
from hetu_fx.switching.step.used import GradientUse
from hetu_fx.switching.step.variant import Variant
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.states import Summed

RUNS_ONCE = (
    "a plan with pipeline stages or several micro-batches runs backward inside forward, once, for the loss that the "
    "model returns"
)


@dataclass(frozen=True)
class TiedInput:
    """An input that needs a gradient.

    Attributes:
        outer: as the user has passed it.
        bring_back: takes the gradient of this rank's rows as they ran, makes it that of `outer`; collective.
    """

    outer: Tensor
    bring_back: Callable[[Tensor | None], Tensor]


@dataclass
class StepBackward:
    """The backward of one step on this rank.

    Attributes:
        collector: has the parameters.
        pieces: what the step has made, as parts of its own graph.
        inputs: those that need a gradient.
        leaves: their rows in the step's own graph; a rank without rows has none.
    """

    collector: Collector
    pieces: Sequence[Tensor]
    inputs: Mapping[str, TiedInput] = field(default_factory=dict)
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    is_over: bool = False

    def run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the home parameters and of the inputs, from those of the pieces.

        Args:
            gradients: of the pieces.
            nodes: of the user's graph, which take what is returned.
        """
        with self.collector.host.counted():
            self._check(gradients)
            with self.collector.passing():
                return self._run(gradients, nodes)

    def _run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        of_outputs = any(gradient is not None for gradient in gradients[1:])
        self.collector.begin(nodes, of_outputs=of_outputs)
        if of_outputs:
            gradients = self._scaled(gradients)
        keeps = keeps_graph()
        pairs = [(p, g) for p, g in zip(self.pieces, gradients, strict=True) if g is not None and p.requires_grad]
        if pairs:
            start = self.collector.host.now()
            with self.collector.noting():
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs], retain_graph=keeps)
            self.collector.host.exclude_since(start)
        self.is_over = not keeps or self.collector.ran_ahead
        home = self.collector.finish(goes_on=not self.is_over)
        if self.is_over:
            self.pieces = [piece.detach() for piece in self.pieces]
        found = [self._of_input(name, tied) for name, tied in self.inputs.items()]
        parameters = [self.collector.homes[name] for name in self.collector.trained]
        left = _put(parameters, list(map(home.get, self.collector.trained)), nodes[: len(parameters)])
        return (*left, *found)

    def _scaled(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return gradients of which those of outputs are right once all are multiplied by what the loss's lacks."""
        factor = self.collector.correction()
        if factor == 1.0:
            return gradients
        if factor == 0.0:
            self.collector.refuse(
                "the gradient of the loss is 0 on the average of all ranks, while other outputs have gradients\nhint: "
                'ask for these outputs by hetu_fx.auto_parallelize(..., outputs="all"), or leave the loss out'
            )
        loss, *others = gradients
        return [loss, *(None if gradient is None else gradient / factor for gradient in others)]

    def _check(self, gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            self.collector.refuse(
                "create_graph=True asks for a second derivative, which a parallel model does not have; compute the "
                'penalty inside the model\'s forward and pass capture="eager" to hetu_fx.auto_parallelize, or take it '
                "inside model.hetu.whole()"
            )
        if self.is_over:
            once = f"{RUNS_ONCE}; " if self.collector.ran_ahead else ""
            self.collector.refuse(
                f"{once}backward goes through this step a second time, but what it needs was freed after the first\n"
                f"hint: pass retain_graph=True to the first (under a plan of one stage and one micro-batch)"
            )
        if self.collector.ran_ahead and any(gradient is not None for gradient in gradients[1:]):
            self.collector.refuse(
                f"{RUNS_ONCE}, but a gradient came for another output; compute the whole loss in the model, or pass "
                f"loss_fn=... to hetu_fx.auto_parallelize"
            )

    def _of_input(self, name: str, tied: TiedInput) -> Tensor:
        leaf = self.leaves.get(name)
        if leaf is None:
            return tied.bring_back(None)
        gradient = take_gradient(leaf)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient * self.collector.correction()
        return tied.bring_back(gradient)


def _put(
    parameters: Sequence[nn.Parameter], gradients: list[Tensor | None], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """Put parameters' first gradients where autograd would by `nodes`; return what is left for autograd to do.

    It would make an alias of each first, which takes a home tensor as long as all else that is done for it.
    """
    hooks, accumulated = map(gradient_hooks, parameters), accumulates_into_leaves(nodes)
    for number, (parameter, hooked, is_added) in enumerate(zip(parameters, hooks, accumulated, strict=True)):
        if is_added and gradients[number] is not None and not any(hooked) and parameter.is_leaf:
            if parameter.grad is None:
                parameter.grad, gradients[number] = gradients[number], None
    return gradients


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: StepBackward, *tied: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(piece.detach() for piece in step.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.step.run(gradients, [node for node, _ in ctx.next_functions]))


def _tie_to_user_graph(step: StepBackward) -> list[Tensor]:
    """Return the pieces of a step as parts of the user's graph, the loss first if there is one."""
    homes = [step.collector.homes[name] for name in step.collector.trained]
    made: Sequence[Tensor] = apply_outside_transforms(
        _Boundary, step, *homes, *(one.outer for one in step.inputs.values())
    )
    return list(made)


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

    def filled_up(self, piece: Tensor, table: GroupTable) -> Tensor:
        """Return a piece as large as this rank's part: one of rows that have run in smaller sizes gets zeros after."""
        sizes = self.source.local_shape(table.rank, self.shape)
        more = [0 if size is None else size - own for size, own in zip(sizes, piece.shape, strict=True)]
        ends = [number for size in reversed(more) for number in (0, size)]
        return torch.nn.functional.pad(piece, ends) if any(more) else piece

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


def _with_summed_copies(target: Annotation) -> Annotation:
    """Return where the gradient of an output lies: ranks that have a copy of it each have a summand."""
    axes = [Partial(axis.ways) if isinstance(axis, Duplicate) else axis for axis in target.shardings[0].axes]
    return Annotation.on(target.ranks, *axes)


class ReturnOutput(torch.autograd.Function):
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


def share_of_loss(inputs: StepInputs, table: GroupTable, *, adds_up: bool) -> float:
    """Return what part of the loss each rank returns; the first step says so where it is not all of it.

    That is a part where ranks bring rows of their own and the loss is a sum over rows (`adds_up`).
    """
    if inputs.shared or table.size == 1 or not adds_up:
        return 1.0
    if inputs.step == 0 and table.rank == 0:
        warn_user(
            f"the loss is a sum over rows: each of {table.size} ranks returns the sum over all rows divided by "
            f"{table.size}, so that the mean over ranks is right, as under DistributedDataParallel\n"
            f"hint: multiply it by {table.size} for the sum itself, or return a mean",
        )
    return 1.0 / table.size


class StepFrame:
    """One step of one variant on this rank, around the part in which the model runs.

    Args:
        variant: runs the step.
        inputs: what the step needs besides the batch.
        scale: what the loss is multiplied by.
        may_run_ahead: in training, backward runs in forward, before the gradient of the loss is known.
        in_float16: gradients may be of float16, so that backward must run with what the loss is scaled by.
        gives_values: other outputs than the loss are asked for, whose gradients may come too.
        needing: inputs that need a gradient.
        row_dims: the dims of inputs that count rows.

    Attributes:
        units: the step's way through units of parameters, where these are gathered unit by unit.
        is_direct: the model runs with the parameters and inputs themselves, and its graph of autograd is the user's:
            on a rank alone, as nothing has to be brought anywhere.
    """

    def __init__(
        self,
        variant: Variant,
        inputs: StepInputs,
        *,
        scale: float = 1.0,
        may_run_ahead: bool = False,
        in_float16: bool = True,
        gives_values: bool = False,
        needing: Mapping[str, Tensor] | None = None,
        row_dims: RowDims,
    ) -> None:
        self.variant, self.inputs, self.table = variant, inputs, variant.table
        place = variant.plan.place(self.table.rank)
        self.interval = range(0, 0) if place is None else inputs.rows.pipelines[place[0]]
        self.needing, self._row_dims = dict(needing or {}), row_dims
        self.trains = torch.is_grad_enabled() and bool(variant.trained or self.needing)
        self.runs_ahead = self.trains and may_run_ahead
        self.is_direct = self.table.size == 1 and not self.runs_ahead
        self._scale = scale
        self.root = inputs.guess.value * scale if in_float16 else 1.0  # what a backward that runs ahead begins with
        ran_with = self.root / scale if self.runs_ahead else None
        exact = in_float16 or (gives_values and not self.runs_ahead)
        self._loss_gradient = LossGradient(self.table, inputs.guess, ran_with, exact=exact, step=inputs.step)
        self.units: UnitWalk | None = None
        self._gathering: Collector | None = None
        self._leaves: dict[str, Tensor] = {}
        self._check_inputs()

    def parameters(self, bridge: Bridge) -> dict[str, Tensor]:
        """Return what this rank computes with: the parameters, or copies that come by the bridge; collective then."""
        if self.is_direct:
            return {entry.name: self.variant.homes[entry.name] for entry in bridge.plan.entries}
        if self.units is not None:
            return self.units.copies
        return self.variant.compute.gather(bridge)

    def collector(
        self, bridge: Bridge, compute: Mapping[str, Tensor], *, overlaps: bool, used: GradientUse
    ) -> Collector:
        """Make the compute tensors leaves of this step's autograd graph, before the model runs; once.

        See `Collector` for `overlaps` and `used`. Backward of what this rank returns ends in the collector.
        """
        overlaps = overlaps and not (self.runs_ahead and self._loss_gradient.exact)
        self._gathering = Collector(
            self.variant,
            self.inputs,
            bridge,
            compute,
            loss_gradient=self._loss_gradient,
            ran_ahead=self.runs_ahead,
            overlaps=overlaps,
            used=used,
            units=self.units,
        )
        return self._gathering

    def _check_inputs(self) -> None:
        """Refuse inputs whose gradient would not come out whole."""
        if not self.needing:
            return
        alone = all(len(pipeline.devices) == 1 for pipeline in self.variant.plan.pipelines)
        if self.runs_ahead or not alone:
            raise StateError(
                f"input {sorted(self.needing)} needs a gradient. The plan must have pipelines of one device and one "
                f"micro-batch (such as Plan.data_parallel), but it is {self.variant.plan}\n"
                f"hint: detach the input, use such a plan, or take the gradient inside model.hetu.whole()"
            )

    def leaves_of(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of all inputs, as leaves of the step's own graph where they need a gradient."""
        if self.is_direct:
            return dict(rows)
        own = {name: tensor.detach() for name, tensor in rows.items()}
        self._leaves = {name: own[name].requires_grad_() for name in self.needing if name in own}
        return own

    def outside(
        self, values: Mapping[str, Tensor], routes: Sequence[ValueRoute], local_loss: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return this rank's pieces of the outputs, and its part of the loss, as parts of the user's graph.

        A rank that has made none has placeholders, so that its backward is that of the others.
        """
        if self._gathering is None:
            if local_loss is not None and local_loss.requires_grad:
                local_loss.register_hook(partial(_stop_at_end, self.inputs.timer))
            return dict(values), local_loss
        floats = [route for route in routes if carries_gradient(route.dtype)]
        none = {route.name: torch.zeros((), dtype=route.dtype, device=self.variant.device) for route in floats}
        pieces = {name: values.get(name, zero) for name, zero in none.items()}
        first = [] if local_loss is None else [local_loss]
        inputs = {
            name: TiedInput(outer, partial(self._brought_back, outer, self._row_dims[name]))
            for name, outer in self.needing.items()
        }
        made = _tie_to_user_graph(StepBackward(self._gathering, [*first, *pieces.values()], inputs, self._leaves))
        loss = None if local_loss is None else made.pop(0)
        return {**values, **dict(zip(pieces, made, strict=True))}, loss

    def _brought_back(self, outer: Tensor, rows_dim: int, gradient: Tensor | None) -> Tensor:
        """Move the gradient of an input's rows to the rank that has passed them.

        As under DistributedDataParallel it is that of the rank's own loss, the mean of which is trained on.
        """
        rows, shared = self.inputs.rows, self.inputs.shared
        groups = [pipeline.devices for pipeline in self.variant.plan.pipelines]
        source = at_pipelines(groups, [Sharding((Duplicate(1),)) for _ in groups], rows_dim, rows)
        shape, target = with_rows(tuple(outer.shape), rows_dim, rows.total), at_ranks(rows, rows_dim, shared=shared)
        back = move_tensor(gradient, source, target, shape, outer.dtype, self.table)
        assert back is not None, "every rank is a target"
        return back if shared else back * self.table.size

    def global_loss(self, local: Tensor, contributes: bool) -> Tensor:
        """Return the loss of the whole batch from each rank's part, of those that contribute one."""
        loss: Tensor = apply_outside_transforms(
            GlobalLoss, local, self._loss_gradient, contributes, self._scale, self.inputs.timer
        )
        return loss

    def own_outputs(
        self, routes: tuple[ValueRoute, ...], values: Mapping[str, Tensor], *, has_work: bool
    ) -> dict[str, Tensor]:
        """Return the outputs that belong to this rank's rows; collective.

        A loss may be computed of them, whose gradient comes back then.

        Args:
            routes: of all outputs that are wanted.
            values: this rank's pieces by name.
            has_work: this rank had rows; without, its pieces are placeholders.
        """
        returned: dict[str, Tensor] = {}
        for route in routes:
            piece = values.get(route.name, torch.zeros((), dtype=route.dtype))
            holds = route.source.holds(self.table.rank)
            if holds and (not has_work or route.name not in values):
                piece = route.without_rows(piece, self.table)
            returned[route.name] = apply_outside_transforms(
                ReturnOutput, piece, holds, route, self.table, self.inputs.shared
            )
        return returned


def _stop_at_end(timer: ComputeTimer, gradient: Tensor) -> None:
    """Have the backward stop, when it is through, what the gradient of the loss has started."""
    at_end_of_backward(timer.stop)
