"""Trains a model on one device and under plans, in float64, with the same batch, and judges whether it is the same."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.api import auto_parallelize
from hetu_fx.base.dtypes import in_double as double_of
from hetu_fx.base.dtypes import is_complex
from hetu_fx.base.torch_private import tree_map_only
from hetu_fx.check.verdict import TrialVerdict, judge
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CommError, HetuFxError, PlanError, ProfileError
from hetu_fx.graph.bind import as_call
from hetu_fx.lockstep import Lockstep, Step, Trained, find_loss
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.home.ops import full_tensor

Plans = Mapping[str, Plan | str]
SEED = 0


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        steps: how many.
        optimizer: one of torch.optim by name.
        lr: its learning rate.
        device: of this process.
        ranks: how many ranks this process is, one after another; None: it is one of the job's.
        row_dims: which dims of inputs count rows, as for `auto_parallelize`.
    """

    steps: int
    optimizer: str
    lr: float
    device: str
    ranks: int | None = None
    row_dims: Mapping[str, int | None] = field(default_factory=dict)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of parameters."""
        kind = getattr(torch.optim, self.optimizer, None)
        if kind is None:
            raise ProfileError(f"torch.optim has no {self.optimizer!r}\nhint: name an optimizer like SGD or AdamW")
        made: torch.optim.Optimizer = kind(parameters, lr=self.lr)
        return made


def compare_plans(
    make: Callable[[], tuple[Any, Any]], plans: Plans, training: Training, tolerance: float
) -> list[TrialVerdict]:
    """Return how the model does under each plan; collective over the processes of the job.

    A model that draws random numbers draws others in hetu_fx than in torch: it is compared with hetu_fx on one device.
    """
    torch.manual_seed(SEED)
    model, batch = in_double(*make(), training.device)
    is_random = draws_random_numbers(model, batch)
    says = "compared with hetu_fx on one device, as the model draws random numbers" if is_random else ""
    _tell("training on one device")
    first: Plan | str | None = Plan.single(0) if is_random else None
    alone = _train_whole(copy.deepcopy(model), batch, first, training)
    return [_verdict(name, plan, model, batch, training, (alone, tolerance, says)) for name, plan in plans.items()]


def _verdict(
    name: str, plan: Plan | str, model: nn.Module, batch: Any, training: Training, against: tuple[Trained, float, str]
) -> TrialVerdict:
    _tell(f"training under plan {name}")
    try:
        made = (_train_whole if training.ranks is None else _trained_by_all)(
            copy.deepcopy(model), batch, plan, training
        )
    except CommError as error:
        if training.ranks is None:
            return TrialVerdict(name, "refused", str(error))
        return TrialVerdict(name, "differs", str(error))
    except HetuFxError as error:
        return TrialVerdict(name, "refused", str(error))
    alone, tolerance, says = against
    return judge(name, alone, made, tolerance, says)


def in_double(model: nn.Module, batch: Any, device: str) -> tuple[nn.Module, Any]:
    """Return the model and its batch on the device, with real and complex numbers in double precision."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.to(device, double_of(tensor.dtype))

    model = model.to(device).double().train()
    for own in (*model.parameters(), *model.buffers()):
        if is_complex(own.dtype):  # which `double` leaves as they are
            own.data = own.data.to(double_of(own.dtype))
    return model, tree_map_only(Tensor, double, batch)


def draws_random_numbers(model: nn.Module, batch: Any) -> bool:
    """Tell whether the loss of a plain model depends on the seed."""
    losses = []
    for seed in (SEED, SEED + 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(find_loss(_call(copy.deepcopy(model), batch))))
    torch.manual_seed(SEED)
    return losses[0] != losses[1]


def _train_whole(model: nn.Module, batch: Any, plan: Plan | str | None, training: Training) -> Trained:
    """Train, on this device alone if there is no plan, else collectively; all that is returned is whole."""
    optimizer = training.make_optimizer([p for p in model.parameters() if p.requires_grad])
    if plan is not None:
        dims = training.row_dims
        auto_parallelize(
            model, batch, plan=plan, optimizer=optimizer, data="global", seed=SEED, row_dims=dims, check=False
        )
    steps = []
    for _ in range(training.steps):
        loss = find_loss(_call(model, batch))
        loss.backward()
        steps.append(Step(float(loss.detach()), _gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    state = (*model.named_parameters(), *model.named_buffers())
    return Trained(steps, {name: _whole(tensor) for name, tensor in state})


def _trained_by_all(model: nn.Module, batch: Any, plan: Plan | str, training: Training) -> Trained:
    """Train as all ranks, in this process.

    Raises:
        PlanError: the plan is to be made for measured devices.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is made for processes, which are measured\nhint: give a plan file, data or tensor")
    how = Lockstep(training.make_optimizer, ranks=training.ranks, row_dims=training.row_dims, seed=SEED)
    return how.train(model, [batch] * training.steps, plan)


def _call(model: nn.Module, batch: Any) -> Any:
    args, kwargs = as_call(batch)
    return model(*args, **kwargs)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor; collective for one of which each process has a piece."""
    return full_tensor(tensor).detach().cpu().clone()


def _tell(what: str) -> None:
    """Say on rank 0 what takes time now."""
    if GroupTable().rank == 0:
        print(f"{what} ...", file=sys.stderr, flush=True)
