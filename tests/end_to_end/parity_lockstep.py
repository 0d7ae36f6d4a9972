"""Cells of the parity matrix run as all ranks of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import torch

from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.switching.graph_execution import GraphExecution
from tests.end_to_end.cells import (
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
    return how.train(make_model(cell.model), batches(cell.model), PLANS[cell.plan], captured(cell.model))


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    return [make_batch(model, step, number) for number, step in enumerate(STEPS)]


@cache
def alone(model: str) -> Trained:
    how = Lockstep(partial(torch.optim.AdamW, lr=1e-2), loss_fn=LOSS_FNS.get(model))
    return train_alone(make_model(model), batches(model), how)


@cache
def captured(model: str) -> GraphExecution:
    return Lockstep(loss_fn=LOSS_FNS.get(model)).capture(make_model(model), batches(model)[0])


def check_trained(cell: Cell, made: Trained) -> None:
    check_equal(cell.name, alone(cell.model), made, cell.model)
