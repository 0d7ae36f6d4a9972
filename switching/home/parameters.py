"""The parameters of a model, and what its optimizer has of them, as home tensors: put in once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.ops import HomeTensor


def move_home(model: nn.Module, layouts: Mapping[str, HomeLayout], table: GroupTable) -> dict[str, nn.Parameter]:
    """Replace every parameter by a home parameter that is the same object, so that optimizers keep working.

    The values are rank 0's, as under DistributedDataParallel; collective. Returns the home parameters by first
    name, in the model's order.
    """
    parameters = dict(model.named_parameters())
    pieces = _pieces_of_first(parameters, layouts, table)
    for name, parameter in parameters.items():
        gradient, parameter.grad = parameter.grad, None
        home = HomeTensor(pieces[name], layouts[name])
        torch.utils.swap_tensors(parameter, nn.Parameter(home, requires_grad=parameter.requires_grad))
        if gradient is not None:
            parameter.grad = HomeTensor.from_full(gradient, layouts[name])
    return parameters


def _pieces_of_first(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, HomeLayout], table: GroupTable
) -> dict[str, torch.Tensor]:
    if table.size == 1:
        return {name: p.detach().clone() for name, p in parameters.items()}
    first = Annotation.on((0,))
    wholes = [parameter.detach() for parameter in parameters.values()]
    moves = [
        TensorMove(first, layouts[name].annotation, tuple(whole.shape), whole.element_size())
        for name, whole in zip(parameters, wholes, strict=True)
    ]
    held = [whole if table.rank == 0 else None for whole in wholes]
    moved = run_moves(plan_moves(moves), held, table, like=wholes)
    return {
        name: whole.new_empty(layouts[name].local_shape) if piece is None else piece
        for name, whole, piece in zip(parameters, wholes, moved, strict=True)
    }


_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch's optimizers: NAdam's and ASGD's beside the count


def move_optimizer_state(
    optimizer: torch.optim.Optimizer, homes: Mapping[str, nn.Parameter], layouts: Mapping[str, HomeLayout]
) -> None:
    """Cut the parameter-shaped state that an optimizer has already into home pieces.

    A number that counts for the whole parameter is no such state, even where the parameter has no dims either.
    """
    for name, home in homes.items():
        state = optimizer.state.get(home, {})
        for key, value in state.items():
            whole = isinstance(value, torch.Tensor) and not isinstance(value, HomeTensor)
            if whole and key not in _NUMBERS and tuple(value.shape) == tuple(home.shape):
                state[key] = HomeTensor.from_full(value, layouts[name])
