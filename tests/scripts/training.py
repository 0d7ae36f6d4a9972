"""Steps of training that many scripts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.scripts import models
from tests.scripts.job import Batch, Job, loss_of


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """Return an optimizer with momentum."""
    return torch.optim.SGD(trained(model), lr=lr, momentum=0.9)


def step(job: Job, model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """Do one step on this rank's rows; return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model(**job.rows(batch)))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def steps(
    job: Job,
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    before_update: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Train on each batch, with something done between backward and update; return the losses."""
    losses = []
    for batch in batches:
        loss = loss_of(model(**job.rows(batch)))
        loss.backward()
        before_update()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def batches(count: int, rows: int = 8) -> list[Batch]:
    """Return batches for the perceptron, in double precision."""
    torch.manual_seed(7)
    return [in_double(models.vectors(rows)) for _ in range(count)]


def in_double(batch: Mapping[str, Tensor]) -> Batch:
    """Return a batch whose numbers are of double precision."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
