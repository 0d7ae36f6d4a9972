"""accelerate: its launcher, its wrapped optimizers, and its mark for models that are prepared."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hetu_fx import Framework, Launcher, register_framework


def mark_prepared(model: nn.Module) -> None:
    """Have accelerate's `prepare` leave the model as it is, by its documented mark for prepared objects."""
    object.__setattr__(model, "_is_accelerate_prepared", True)


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what accelerate has wrapped, as its wrapper has no hooks of its own."""
    wrapped: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return wrapped


TWO_PROCESSES = "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 --num_machines 1 SCRIPT"

register_framework(
    Framework(
        name="accelerate",
        adopt=mark_prepared,
        torch_optimizer=torch_optimizer,
        launcher=Launcher("accelerate launch", "ACCELERATE_MIXED_PRECISION", TWO_PROCESSES),
    )
)
