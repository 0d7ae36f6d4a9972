"""What a script is handed: where it runs, its model and batch, and how it tells what it has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetu_fx
from hetu_fx.plans.plan import Plan
from tests import model_zoo
from tests.scripts import models

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]
M = TypeVar("M", bound=nn.Module)

ROWS = 8


@dataclass(frozen=True)
class Job:
    """One process of one run of a script.

    Attributes:
        plan: None for the plain script on one device.
        rank, world: of this process.
        folder: an empty one of this run, the same on all ranks.
    """

    plan: Plan | None
    rank: int
    world: int
    folder: Path

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain script on one device, with which the others are compared."""
        return self.plan is None

    def parallel(self, model: M, batch: Mapping[str, Any] | tuple[Any, ...], **options: Any) -> M:
        """Make the model parallel, as the script's one line does; nothing on one device."""
        if self.plan is None:
            return model
        return hetu_fx.auto_parallelize(model, batch, **{"plan": self.plan, **options})

    def rows(self, batch: Mapping[str, Tensor]) -> Batch:
        """Return this rank's rows of a batch whose rows divide evenly among ranks."""
        return {name: self.cut(tensor) if tensor.dim() else tensor for name, tensor in batch.items()}

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor."""
        assert tensor.shape[0] % self.world == 0, f"{tensor.shape[0]} rows do not divide among {self.world} ranks"
        each = tensor.shape[0] // self.world
        return tensor[self.rank * each : (self.rank + 1) * each]

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order; ranks may have unequal numbers of rows."""
        return torch.cat([part for part in self.everyones(tensor.detach()) if part.numel()])

    def everyones(self, value: Any) -> list[Any]:
        """Return what all ranks pass, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world > 1:
            dist.barrier()

    def parameters(self, model: nn.Module, prefix: str = "parameter ") -> dict[str, Tensor]:
        """Return all parameters, whole."""
        return {prefix + name: whole(parameter) for name, parameter in model.named_parameters()}

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Return the gradients of all parameters, whole; None for those without."""
        named = model.named_parameters()
        return {f"gradient {name}": None if p.grad is None else whole(p.grad) for name, p in named}

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all buffers."""
        return {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}

    def mlp(self) -> Made:
        """Return a perceptron with a dropout of 0 and a frozen first bias, which returns {"loss", "logits"}."""
        return _made(models.Perceptron, models.vectors)

    def conv(self) -> Made:
        """Return the zoo's convolutional net with batch norm (`stem`, `body`, `head`)."""
        return _made(model_zoo.ConvNet, lambda: model_zoo.conv_batch(ROWS, 0))

    def llama(self, **changes: Any) -> Made:
        """Return a Llama of two layers and a batch with ignored labels, unequally many per row."""
        return self.zoo("llama", **changes)

    def zoo(self, name: str, **changes: Any) -> Made:
        """Return a model of `tests.model_zoo` without dropout, and a batch."""
        sample = model_zoo.SAMPLES[name]
        settings = {**model_zoo.NO_DROPOUT.get(name, {}), **changes}
        return _made(lambda: sample.model(**settings), lambda: sample.batch(ROWS, model_zoo.LENGTH))


def _made(model: Any, batch: Any) -> Made:
    torch.manual_seed(0)
    built = model().double().train()
    torch.manual_seed(1)
    return built, model_zoo.to_double(batch())


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a home tensor, and a copy of what it is; collective."""
    return hetu_fx.full_tensor(tensor).detach().clone()


def loss_of(output: Any) -> Tensor:
    """Return the loss of whatever a model returns."""
    return output["loss"] if isinstance(output, dict) else output.loss
