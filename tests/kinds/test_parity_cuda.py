"""Devices of two kinds train one model: ranks on a GPU and ranks on the CPU equal one device on the CPU, in fp64.

The models compute all of a step in fp64. Llama's norms cast to fp32 whatever the model is in, and a GPU adds them up in
another order than a CPU.

Their messages go over gloo. Two ranks share the GPU, which NCCL refuses to do.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.cells import Cell
from tests.end_to_end.parity_processes import check_outcome, outcomes_of

DEVICES = ("cuda:0", "cpu", "cuda:0", "cpu")
CELLS = (
    *(
        Cell("gpt2", plan)
        for plan in (
            *("1 device", "DP 3:1", "TP2 3:1", "TP2 2:1 sequence parallel", "PP2", "PP2 x TP2"),
            *("TP2>TP1 + 1", "CP2 3:1", "CP2 3:1 ring", "CP2>TP1 + 1"),
        )
    ),
    *(Cell("mlp", plan) for plan in ("DP 3:1", "TP2>TP1 + 1")),
)

pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.timeout(960)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return outcomes_of(CELLS, DEVICES, tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_on_gpu_and_cpu_together_equals_one_device(cell: Cell, outcomes: dict[str, dict[str, Any]]) -> None:
    check_outcome(cell, outcomes[cell.name])
