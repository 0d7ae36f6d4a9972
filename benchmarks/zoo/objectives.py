"""A model of a library as it is, with a loss: a family of the engine that `benchmarks.coverage` has too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families.batches import Batch, MakeBatch, classes
from benchmarks.families.family import Family

Loss = Callable[[Any, Tensor], Tensor]


class Objective(nn.Module):
    """A net, called by the names of its own arguments, and the loss of what it returns."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        """Give the loss alone."""
        return first(self.loss(self.net(**inputs), target))


def scored(loss: Callable[[], nn.Module], channels: int, scores: int) -> nn.Module:
    """Make a small net that scores the places of images, with a loss of a library."""
    return Objective(nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, scores, 1)), loss())


def of_library(
    library: str,
    nets: Mapping[str, Callable[[], nn.Module]],
    loss: Loss | None,
    batch: MakeBatch,
    *,
    micro_batches: int = 2,
) -> list[Family]:
    """Make the families of nets that are trained alike, each named after its library and itself.

    Without `loss` they return their own.
    """
    return [
        Family(f"{library}: {name}", library, partial(_made, make, loss), batch, micro_batches=micro_batches)
        for name, make in nets.items()
    ]


def _made(make: Callable[[], nn.Module], loss: Loss | None) -> nn.Module:
    model = make() if loss is None else Objective(make(), loss)
    _drop_nothing(model)
    return model.train()


def _drop_nothing(model: nn.Module) -> None:
    """Set every rate of dropout to 0, of layers and of functions that a module calls with a rate of its own."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and "Drop" in type(module).__name__ + "StochasticDepth")
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Score classes: of rows, or of places with the classes in dim 1."""
    return functional.cross_entropy(first(output), target)


def squared_error(output: Any, target: Tensor) -> Tensor:
    """Compare values with what they should be."""
    return functional.mse_loss(first(output), target)


def first(output: Any) -> Tensor:
    """Return the first tensor of what a net returns: alone, in a tuple, by name, or as an attribute."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def images_of(size: int, name: str) -> MakeBatch:
    """Make batches of images of this size, passed by this name, and their classes."""

    def batch(rows: int, length: int) -> Batch:
        return {name: torch.randn(rows, 3, size, size), "target": classes(rows)}

    return batch
