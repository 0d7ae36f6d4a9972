"""A program that `auto` proposes for unlike devices runs as processes, like one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster, Link
from tests.planner.search.nets import Convolutions, images, mean_square
from tests.ranks.checks import assert_all_pass

WORLD = 3
ROWS = 13
CLUSTER = Cluster.on_paper([3e9, 2e9, 1e9], intra=Link(1e8, 1e-5))


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_on_three_ranks(gloo_checks: Callable[..., dict[str, list[str | None]]]) -> None:
    assert_all_pass(gloo_checks(__file__, WORLD, 180), WORLD)


def batch(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.double() for name, tensor in images(ROWS).items()}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, torch.Tensor]) -> torch.Tensor:
    optimizer.zero_grad()
    output = model(**given)
    loss = output.loss if hasattr(model, "hetu") else mean_square(output)
    loss.backward()
    optimizer.step()
    return loss.detach()


def check_a_proposed_program_trains_as_one_device(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    plain = Convolutions().double()
    model = copy.deepcopy(plain)
    proposed = hetu_fx.plan(model, batch(0), cluster=CLUSTER, loss_fn=mean_square)
    assert proposed.has_program
    hetu_fx.auto_parallelize(model, batch(0), plan="auto", cluster=CLUSTER, loss_fn=mean_square, data="global")
    assert model.hetu.plan == proposed
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (plain, model)]
    for seed in range(4):
        alone, parallel = (
            stepped(one, optimizer, batch(seed)) for one, optimizer in zip((plain, model), optimizers, strict=True)
        )
        torch.testing.assert_close(parallel, alone, rtol=1e-10, atol=0)
    with model.hetu.whole():
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12, msg=name)
