"""Cells of the parity matrix run as all ranks of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch import nn

from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.switching.graph_execution import GraphExecution
from tests.end_to_end.cells import (
    DEEPER,
    LOSS_FNS,
    PLANS,
    STEPS,
    Cell,
    check_equal,
    make_batch,
    make_model,
)


def trained(cell: Cell, devices: Sequence[str] | None = None) -> Trained:
    """Train under the cell's plan; ranks bring half of the rows, half of the rest and so on, the last often none."""
    most = max(step.rows for step in STEPS)
    cuts = [most - most // 2**rank for rank in range(cell.ranks)] + [most]
    rows = [stop - start for start, stop in pairwise(cuts)]
    how = Lockstep(
        partial(torch.optim.AdamW, lr=1e-2),
        ranks=cell.ranks,
        rows=rows if cell.data == "per_rank" else None,
        loss_fn=LOSS_FNS.get(cell.model),
        devices=devices,
    )
    model = make_model(cell.model, **cell.sizes)
    return how.train(model, batches(cell.model), PLANS[cell.plan], captured(cell.model, bool(cell.sizes)))


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    return [make_batch(model, step, number) for number, step in enumerate(STEPS)]


@cache
def alone(model: str, is_deeper: bool) -> Trained:
    how = Lockstep(partial(torch.optim.AdamW, lr=1e-2), loss_fn=LOSS_FNS.get(model))
    return train_alone(_model(model, is_deeper), batches(model), how)


@cache
def captured(model: str, is_deeper: bool = False) -> GraphExecution:
    return Lockstep(loss_fn=LOSS_FNS.get(model)).capture(_model(model, is_deeper), batches(model)[0])


def _model(model: str, is_deeper: bool) -> nn.Module:
    return make_model(model, **(DEEPER[model] if is_deeper else {}))


def check_trained(cell: Cell, made: Trained) -> None:
    check_equal(cell.name, alone(cell.model, bool(cell.sizes)), made, cell.model)
