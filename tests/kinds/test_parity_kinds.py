"""Devices of unlike types train one model: rank 0 on the tests' own type, the others on the host, against one device.

All plans run as all ranks of one process, by one model, and each of the others under a few; one cell for each way in
which ranks meet runs as processes over gloo. What a model makes of all plans is held on one type (`end_to_end`).
`make parity` (HETU_FX_PARITY=full) runs every model under every plan as all ranks of one process.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from hetu_fx.errors import HetuFxError
from tests.end_to_end.cells import ALL_CELLS, PLANS, REFUSED, Cell, in_double
from tests.end_to_end.parity_lockstep import check_trained, trained
from tests.end_to_end.parity_processes import SECONDS_IN_ALL, check_outcome, outcomes_of
from tests.kinds.testkind import NAME, on_testkind
from tests.ranks.remembered import remembered_captures

IS_FULL = os.environ.get("HETU_FX_PARITY") == "full"
FEW = {
    "gpt2": ("CP2 3:1 x TP2 2:1", "PP2 interleaved"),
    "mlp": ("TP2>TP1 + 1",),
    "conv": ("DP 3:1",),
    "bert": ("CP2 3:1",),
    "vit": ("TP2 3:1", "PP2 + PP1"),
    "t5": ("PP2 interleaved",),
    "mixtral": ("TP2", "PP2 + PP1"),
}
IN_LOCKSTEP = (
    ALL_CELLS
    if IS_FULL
    else (
        *(Cell("llama", plan) for plan in PLANS),
        *(Cell(model, plan) for model, plans in FEW.items() for plan in plans),
    )
)
MODELS = tuple(dict.fromkeys(cell.model for cell in IN_LOCKSTEP))
IN_PROCESSES = (
    *(Cell("llama", plan) for plan in ("1 device", "DP 3:1", "TP2 3:1", "PP2 x TP2", "CP2 3:1 ring")),
    *(Cell("gpt2", plan) for plan in ("TP2>TP1 + 1", "TP2 + TP1")),
    Cell("bert", "PP2 x TP2"),
    Cell("conv", "TP2 + TP1"),
    Cell("t5", "TP2>TP1 + 1"),
    Cell("mixtral", "DP 3:1"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
@on_testkind
@remembered_captures()
def test_training_as_all_ranks_of_one_process_on_two_types_equals_one_device(model: str) -> None:
    in_double()
    for cell in (cell for cell in IN_LOCKSTEP if cell.model == model):
        devices = [f"{NAME}:0", *("cpu" for _ in range(1, cell.ranks))]
        reason = REFUSED.get((cell.model, cell.plan))
        if reason is None:
            check_trained(cell, trained(cell, devices))
        else:
            with pytest.raises(HetuFxError, match=reason):
                trained(cell, devices)


@pytest.mark.parametrize("plan", ["PP2", "TP2", "DP 3:1"])
@on_testkind
@remembered_captures()
def test_it_does_not_matter_which_rank_is_of_the_other_type(plan: str) -> None:
    in_double()
    cell = Cell("llama", plan)
    check_trained(cell, trained(cell, ["cpu", f"{NAME}:0"]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    ranks = max(cell.ranks for cell in IN_PROCESSES)
    return outcomes_of(IN_PROCESSES, (NAME, *("cpu",) * (ranks - 1)), tmp_path_factory.mktemp("parity"))


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS_IN_ALL + 60)
@pytest.mark.parametrize("cell", IN_PROCESSES, ids=lambda cell: cell.name)
def test_training_on_two_types_as_processes_equals_one_device(cell: Cell, outcomes: dict[str, dict[str, Any]]) -> None:
    assert cell.plan in PLANS
    check_outcome(cell, outcomes[cell.name])
