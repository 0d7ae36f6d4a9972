"""Training under a plan equals training on one device: loss, every gradient, parameters after AdamW steps.

A covering selection runs as all ranks of one process, and some of it, one cell for each way in which ranks meet, as
processes. `make parity` (HETU_FX_PARITY=full) runs the whole matrix as processes and writes docs/support.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from hetu_fx.errors import HetuFxError
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.switching.graph_execution import GraphExecution
from tests.end_to_end.cells import (
    ALL_CELLS,
    COVERING,
    LOSS_FNS,
    PLANS,
    PROCESSES,
    REFUSED,
    STEPS,
    Cell,
    check_equal,
    make_batch,
    make_model,
)
from tests.end_to_end.parity_processes import SECONDS_IN_ALL, check_outcome, outcomes_of, write_table

IS_FULL = os.environ.get("HETU_FX_PARITY") == "full"
IN_PROCESSES = ALL_CELLS if IS_FULL else PROCESSES
DEVICES = ("cpu",) * max(cell.ranks for cell in IN_PROCESSES)


@pytest.mark.usefixtures("losses_in_double")
@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: cell.name)
def test_training_as_all_ranks_of_one_process_equals_one_device(cell: Cell) -> None:
    reason = REFUSED.get((cell.model, cell.plan))
    if reason is not None:
        with pytest.raises(HetuFxError, match=reason):
            trained(cell)
        return
    check_equal(cell.name, alone(cell.model), trained(cell), cell.model)


def trained(cell: Cell) -> Trained:
    """Train under the cell's plan; ranks bring half of the rows, half of the rest and so on, the last often none."""
    most = max(step.rows for step in STEPS)
    cuts = [most - most // 2**rank for rank in range(cell.ranks)] + [most]
    rows = [stop - start for start, stop in pairwise(cuts)]
    how = Lockstep(
        partial(torch.optim.AdamW, lr=1e-2),
        ranks=cell.ranks,
        rows=rows if cell.data == "per_rank" else None,
        loss_fn=LOSS_FNS.get(cell.model),
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    found = outcomes_of(IN_PROCESSES, DEVICES, tmp_path_factory.mktemp("parity"))
    if IS_FULL:
        write_table(found)
    return found


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS_IN_ALL + 60)
@pytest.mark.parametrize("cell", IN_PROCESSES, ids=lambda cell: cell.name)
def test_training_under_a_plan_equals_one_device(cell: Cell, outcomes: Mapping[str, dict[str, Any]]) -> None:
    check_outcome(cell, outcomes[cell.name])
