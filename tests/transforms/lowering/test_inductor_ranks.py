"""Graphs compiled by inductor train as one device on two gloo ranks, what they communicate included."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetu_fx.plans.plan import Plan, Stage
from tests.end_to_end.cells import make_model
from tests.end_to_end.twins import Twins, batch_of, one

WORLD = 2
PLAN = Plan((one(Stage((0, 1), ratios=(3, 1))),), sequence_parallel=True)


def check_compiled_graphs_train_as_one_device(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / f"rank_{rank}"))
        twins = Twins("gpt2", PLAN, None, make=partial(make_model, n_layer=2), compile="inductor")
        for seed in range(2):
            twins.step(batch_of("gpt2", 4, seed=seed), (3, 1))


def check_ranks_that_keep_more_and_less_train_as_one_device(rank: int, world: int, folder: Path) -> None:
    for plan in (PLAN, replace(PLAN, sequence_parallel=False)):
        with torch._functorch.config.patch(activation_memory_budget=float(rank)):
            twins = Twins("llama", plan, None, compile="aot_eager")
            for seed in range(2):
                twins.step(batch_of("llama", 4, seed=seed), (3, 1))


CHECKS = check_compiled_graphs_train_as_one_device, check_ranks_that_keep_more_and_less_train_as_one_device


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(gloo_checks: Any, check: Callable[..., None]) -> None:
    found = gloo_checks(__file__, WORLD, 540)[check.__name__]
    assert found == [None] * WORLD, found
