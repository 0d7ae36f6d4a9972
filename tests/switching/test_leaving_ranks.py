"""One rank evaluates alone after the last step, while the other one destroys its group, and ends."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetu_fx
from tests.spawned import run

SECONDS = 100


def wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    """Tell whether a process has ended, also while its parent has not asked for its status (Z)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def trained(rank: int, plain: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    """Return a model after one step, with loss and output as its result; `plain` makes the same step."""
    model = hetu_fx.auto_parallelize(
        copy.deepcopy(plain),
        (x[:4],),
        plan=hetu_fx.Plan.data_parallel(2),
        loss_fn=lambda output, *batch: output.square().mean(),
        options=hetu_fx.Options(wait_seconds=5.0, **options),
        check=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x[4 * rank : 4 * rank + 4])[0].backward()
    optimizer.step()
    return model


def error_of(model: Any, x: torch.Tensor) -> str:
    try:
        return str(model(x))
    except hetu_fx.HetuFxError as error:
        return str(error)


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    keeps, keeps_none = trained(rank, plain, x), trained(rank, plain, x, idle_bytes=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).square().mean().backward()
    optimizer.step()
    destroyed, evaluated = folder / "destroyed", folder / "evaluated"
    if rank == 1:
        dist.destroy_process_group()
        (folder / "process").write_text(str(os.getpid()))
        destroyed.touch()
        wait(evaluated.exists)
        return
    wait(destroyed.exists)
    wanted, given = plain(x[:3]), x[:3]

    def is_right(model: Any) -> bool:
        return torch.allclose(model.eval()(given)[1], wanted, rtol=1e-10, atol=1e-12)

    with torch.no_grad():
        are_right = [is_right(keeps), is_right(keeps_none)]
        evaluated.touch()
        wait(lambda: has_ended(int((folder / "process").read_text())))
        are_right.append(is_right(keeps))
        without_shards = error_of(keeps_none, given)
    found = {"right": are_right, "shards": without_shards, "gradients": error_of(keeps, given)}
    (folder / "found").write_text(json.dumps(found))


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_rank_evaluates_alone_as_long_as_it_has_or_gets_the_weights(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path))
    root = str(Path(__file__).parents[2])
    code, told = run(sys.executable, *launch, seconds=250, PYTHONPATH=root)
    assert code == 0, told
    found = json.loads((tmp_path / "found").read_text())
    assert found["right"] == [True, True, True]
    assert "needs rank 1's shards of the model, but that has come to its end\nhint: evaluate, save" in found["shards"]
    assert "hint: a rank that the others have left may still evaluate under torch.no_grad()" in found["gradients"]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
