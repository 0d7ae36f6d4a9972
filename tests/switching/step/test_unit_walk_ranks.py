"""Units of parameters between two processes: the numbers of zero 1, bit for bit, as between threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.plans.plan import Plan
from tests.switching.step.unit_models import adapted, batch, words

WORLD = 2
UNEVEN = Plan.data_parallel(WORLD, (1, 3))
SPEEDS = hetu_fx.Cluster.on_paper([3e9, 1e9])


def trained(make: Callable[[], nn.Module], zero: int, steps: int = 3) -> tuple[nn.Module, list[torch.Tensor]]:
    """Train a model whose homes are 3:1; return it with the gradients of all steps."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = replace(UNEVEN, zero=zero)
    model = hetu_fx.auto_parallelize(
        model, batch(), plan=plan, cluster=SPEEDS, optimizer=optimizer, data="global", check=False
    )
    gradients = []
    for number in range(steps):
        model(**batch(seed=number)).backward()
        gradients += [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return model, gradients


def check_all_numbers_are_those_of_zero_1(rank: int, world: int, folder: Path) -> None:
    for make in (partial(words, tied=True), adapted):
        (first, expected), *others = (trained(make, zero) for zero in (1, 2, 3))
        for other, found in others:
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
            for one, own in zip(first.parameters(), other.parameters(), strict=True):
                assert torch.equal(one.full_tensor(), own.full_tensor())


def check_nothing_is_left_gathered(rank: int, world: int, folder: Path) -> None:
    model, _ = trained(words, 3, steps=1)
    (variant,) = model.hetu._runtime.variants.values()
    (buffers,) = variant.compute.buffers
    assert buffers.live_bytes == 0
    assert 0 < buffers.most_bytes <= buffers.plan.most_bytes
    with torch.no_grad():
        model(**batch())
    assert buffers.live_bytes == 0


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_processes_gather_units(gloo_checks: Callable[[str, int], dict[str, list[str | None]]]) -> None:
    outcome = gloo_checks(__file__, WORLD)
    assert outcome == dict.fromkeys(outcome, [None] * WORLD), outcome
