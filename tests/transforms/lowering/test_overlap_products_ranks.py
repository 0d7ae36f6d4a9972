"""Trainings on real processes with products beside communication, eager and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawned import results_of

WORLD = 2
CASES = [(shared, backend) for shared in (False, True) for backend in (None, "aot_eager")]


def work(rank: int, store: str, results: Any) -> None:
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    import hetu_fx
    from tests.transforms.lowering.test_overlap_steps import SLOW, Blocks, batch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = []
    for shared, backend in CASES:
        torch.manual_seed(3)
        model, given = Blocks().double(), [batch(6, 32), batch(5, 17)]
        plan = replace(hetu_fx.Plan.tensor_parallel((0, 1), (2, 1)), sequence_parallel=shared)
        options = {"plan": plan, "cluster": SLOW.without([2, 3, 4]), "compile": backend, "data": "global"}
        hetu_fx.auto_parallelize(model, given[0], options=hetu_fx.Options(health={"patience": 10**6}), **options)
        for rows in given:
            model(**rows).backward()
        found.append([parameter.grad.full_tensor().numpy() for parameter in model.parameters()])
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_gradients_are_those_of_one_device(tmp_path: Path) -> None:
    import torch

    from tests.transforms.lowering.test_overlap_steps import Blocks, batch

    found = results_of(work, WORLD, str(tmp_path / "store"), seconds=250)
    torch.manual_seed(3)
    model, given = Blocks().double(), [batch(6, 32), batch(5, 17)]
    for rows in given:
        model(**rows).backward()
    for rank in range(WORLD):
        for case, of_case in zip(CASES, found[rank], strict=True):
            for own, parameter in zip(of_case, model.parameters(), strict=True):
                torch.testing.assert_close(torch.from_numpy(own), parameter.grad, msg=str(case))
