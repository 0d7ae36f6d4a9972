"""What is on trial: a model in its smallest form, and the batches it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.families.batches import MakeBatch


@dataclass(frozen=True, slots=True)
class Family:
    """A model family in its smallest form.

    Fields:
        name: the model type; unique.
        kind: what it is trained for.
        make: makes the model, in training mode, without dropout.
        batch: makes batches of so many rows and tokens.
        dtype: what it can be computed in; torch's grouped matrix products know no float64.
        micro_batches: 1 for a model that works out something from the whole batch (batch norm).
        fixed_length: whether its graph is for one sequence length (a loop over positions).
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    batch: MakeBatch
    dtype: torch.dtype = torch.float64
    micro_batches: int = 2
    fixed_length: bool = False
