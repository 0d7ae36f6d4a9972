"""The log of a run of several processes: the loss of all rows, and the memory of each process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction
from hetu_fx.report.page import SECTIONS, report_json
from hetu_fx.report.read import read_log
from hetu_fx.switching.step.compiled_plans import GatheredRowsWarning

WORLD, STEPS = 2, 4
PLANS = (Plan.data_parallel([0, 1], [3, 1]), Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


def run(rank: int, plan: Plan, file: Path, *, logs: bool) -> list[float]:
    """Train a tower; return the losses that the script was given."""
    torch.manual_seed(3)
    model: Any = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(STEPS, 8, 8)
    cluster = Cluster.on_paper([3e9, 1e9])
    hetu_fx.auto_parallelize(model, (x[0],), plan=plan, cluster=cluster, optimizer=optimizer, data="global")
    log = model.hetu.log(file) if logs else None
    losses = []
    for rows in x:
        loss = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    if log is not None:
        log.close()
    return [loss.item() for loss in losses]


def check_losses_and_the_memory_of_all_are_in_the_log(rank: int, world: int, folder: Path) -> None:
    for number, plan in enumerate(PLANS):
        file = folder / f"{number}.jsonl"
        losses = run(rank, plan, file, logs=True)
        if rank == 0:
            told = report_json(read_log(file))
            assert [entry["loss"] for entry in told["losses"]] == losses, (told["losses"], losses)
            assert all(count > 1e8 for count in told["memory"]["peak_bytes"])
            assert all(told[key] for key in SECTIONS if key not in ("changes", "gathered"))
            assert told["gathered"] == {}


def check_a_process_that_does_not_log_is_waited_for_by_none(rank: int, world: int, folder: Path) -> None:
    file = folder / "alone.jsonl"
    run(rank, PLANS[0], file, logs=rank == 0)
    if rank == 0:
        peaks = report_json(read_log(file))["memory"]["peak_bytes"]
        assert (peaks[0] > 1e8, peaks[1]) == (True, 0)


def check_a_function_on_each_rank_gets_equal_steps(rank: int, world: int, folder: Path) -> None:
    import json

    torch.manual_seed(3)
    x = torch.randn(8, 8)
    cluster = Cluster.on_paper([3e9, 1e9])
    model: Any = hetu_fx.auto_parallelize(Tower(), (x,), plan=PLANS[0], cluster=cluster, data="global")
    seen: list[dict[str, Any]] = []
    with model.hetu.on("step", seen.append):
        for _ in range(STEPS):
            model(x).backward()
            model.zero_grad()
    of_own_clock = ("time", "seconds", "rows_per_second", "mfu", "compute_seconds", "host_seconds")
    assert all(key in step for step in seen for key in ("loss", "rows_per_second", "mfu"))
    told = [{key: value for key, value in step.items() if key not in of_own_clock} for step in seen]
    (folder / f"steps_{rank}.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    assert told == json.loads((folder / f"steps_{1 - rank}.json").read_text())
    assert len(told) == STEPS


def check_spans_of_all_ranks_that_log_come_to_the_log_of_the_first(rank: int, world: int, folder: Path) -> None:
    for number, plan in enumerate(PLANS):
        file = folder / f"spans_{number}.jsonl"
        run(rank, plan, file, logs=True)
        if rank == 0:
            traces = [entry for entry in read_log(file) if entry["event"] == "trace"]
            assert sorted(entry["rank"] for entry in traces) == [0, 1], traces
            assert {entry["step"] for entry in traces} == {3}
            for entry in traces:
                assert {"compute", "communication"} <= {kind for _, kind, _, _ in entry["spans"]}, entry


class Pairs(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.blocks[0](x)
        return (u @ u.t()).logsumexp(1).mean()


def check_what_is_gathered_is_warned_of_explained_and_logged_alike(rank: int, world: int, folder: Path) -> None:
    file, x = folder / "pairs.jsonl", torch.randn(8, 8)
    plan = replace(PLANS[0], predicted=Prediction(0.5))
    model: Any = hetu_fx.auto_parallelize(Pairs(), (x,), plan=plan, cluster=Cluster.on_paper([3e9, 1e9]), data="global")
    before = model.hetu.explain()
    with warnings.catch_warnings(record=True) as seen, model.hetu.log(file):
        warnings.simplefilter("always", GatheredRowsWarning)
        for _ in range(2):
            model(x).backward()
    told = [str(one.message) for one in seen if one.category is GatheredRowsWarning]
    assert len(told) == (rank == 0)
    assert model.hetu.explain().endswith(before[before.index("gathered in a step") :]), "before the first step too"
    if rank == 0:
        ((variant, (op,)),) = report_json(read_log(file))["gathered"].items()
        assert (variant, op["op"], op["rows"], op["bytes"]) == (
            model.hetu.current,
            "aten.matmul.default",
            8,
            2 * 8 * 8 * 4,
        )
        assert op["share"] == op["seconds"] / 0.5
        for text in (model.hetu.explain(), told[0]):
            assert all(part in text for part in (op["op"], op["line"], op["source"], op["cure"])), text
        (entry,) = (one for one in read_log(file) if one["event"] == "gathered")
        assert entry["step"] == 1


@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_two_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, 120)[name] if report]
    assert not failures, "\n".join(failures)
