"""What a job of several types of devices is told: ops that a type lacks, dtypes that it has not, graphs that differ."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import HetuFxError, StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan
from tests.kinds import testkind
from tests.kinds.testkind import NAME, PLACE, on_testkind
from tests.spawned import results_of

SHARES = Plan.data_parallel((0, 1), (1, 1))


class Chooses(nn.Module):
    """Has ops that the tests' type of devices lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(x).topk(2)[0].pow(2).mean()}


@on_testkind
def test_ops_that_a_type_lacks_run_on_the_host_and_are_counted_in_a_warning() -> None:
    torch.manual_seed(0)
    model, batch = Chooses().double(), {"x": torch.randn(6, 6, dtype=torch.float64)}
    how = Lockstep(devices=(f"{NAME}:0", "cpu"), ranks=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = how.train(model, [batch], SHARES)
    (warning,) = (str(one.message) for one in told if "lacks" in str(one.message))
    assert f"{PLACE} lacks 1 ops of the graph of rank 0, which run on the host" in warning
    assert warning.endswith("1 x aten.topk.default")
    assert made.steps[0].loss == pytest.approx(train_alone(model, [batch], how).steps[0].loss, rel=1e-12)


@on_testkind
def test_a_dtype_that_a_type_cannot_compute_in_is_refused_with_the_parameter() -> None:
    object.__setattr__(testkind.RECORD, "no_dtypes", frozenset({torch.float64}))
    model, batch = Chooses().double().to(PLACE), {"x": torch.randn(6, 6, dtype=torch.float64, device=PLACE)}
    with pytest.raises(StateError, match=r"'head.weight' is torch.float64, in which devices of type 'testkind' cannot"):
        hetu_fx.auto_parallelize(model, batch, plan=Plan.single(0))


class LooksAround(nn.Module):
    """Has another graph in a process that knows the tests' type: no trace can settle that."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = self.head(x)
        return {"loss": (made.relu() if hasattr(torch, NAME) else made.tanh()).pow(2).mean()}


def prepared(rank: int, folder: Path, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    device = testkind.install() if rank == 0 else torch.device("cpu")
    model, batch = LooksAround().to(device), {"x": torch.randn(6, 6, device=device)}
    try:
        hetu_fx.auto_parallelize(model, batch, plan=SHARES)
        results.put((rank, "prepared"))
    except HetuFxError as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    dist.barrier()


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_graphs_that_differ_are_refused_on_all_ranks_by_their_hash(tmp_path: Path) -> None:
    found = results_of(prepared, 2, tmp_path, seconds=180)
    for text in found.values():
        assert text.startswith("BatchError: "), text
        assert "graph" in text
