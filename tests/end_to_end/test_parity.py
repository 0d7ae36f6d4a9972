"""Training under a plan equals training on one device: loss, every gradient, parameters after AdamW steps.

A covering selection runs as all ranks of one process, and some of it, one cell for each way in which ranks meet, as
processes. `make parity` (HETU_FX_PARITY=full) runs the whole matrix as processes and writes docs/support.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from hetu_fx.errors import HetuFxError
from tests.end_to_end.cells import (
    ALL_CELLS,
    COVERING,
    PROCESSES,
    REFUSED,
    Cell,
)
from tests.end_to_end.parity_lockstep import check_trained, trained
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
    check_trained(cell, trained(cell))


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
