"""neuraloperator: operators over fields on a grid, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from neuralop import losses, models
from torch import Tensor, nn

from benchmarks.families.batches import Batch
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import Loss, first, of_library, squared_error

Options = dict[str, Any]

GRID = 16
MODES: Options = {"in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 2, "n_modes": (6, 6)}
OPERATORS: Mapping[str, Options] = {
    "FNO": MODES,
    "FNO (instance norm)": MODES | {"norm": "instance_norm"},
    "FNO (group norm)": MODES | {"norm": "group_norm"},
    "FNO (linear skips)": MODES | {"fno_skip": "identity", "channel_mlp_skip": "linear"},
    "FNO (padded)": MODES | {"domain_padding": 0.25},
    "FNO (separable)": MODES | {"separable": True},
    "FNO (preactivation)": MODES | {"preactivation": True},
    "FNO (no grid)": MODES | {"positional_embedding": None},
    "TFNO": MODES | {"factorization": "Tucker", "rank": 0.5},
    "TFNO (CP)": MODES | {"factorization": "CP", "rank": 0.5},
}


def _operator(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(models, name.partition(" ")[0])(**options)
    return made


def _fields(rows: int, length: int) -> Batch:
    return {"x": torch.randn(rows, 2, GRID, GRID), "target": torch.randn(rows, 1, GRID, GRID)}


# Of a sum over rows, which is theirs by default, each rank has its part, as under DistributedDataParallel.
def _lp(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = losses.LpLoss(d=2, p=2, reduction="mean")(first(output), target)
    return loss


def _h1(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = losses.H1Loss(d=2, reduction="mean")(first(output), target)
    return loss


LOSSES: Mapping[str, Loss] = {"LpLoss": _lp, "H1Loss": _h1}

FAMILIES: list[Family] = [
    *of_library(
        "neuraloperator",
        {name: partial(_operator, name, options) for name, options in OPERATORS.items()},
        squared_error,
        _fields,
    ),
    *(
        family
        for name, loss in LOSSES.items()
        for family in of_library("neuraloperator", {name: partial(_operator, "FNO", MODES)}, loss, _fields)
    ),
]
