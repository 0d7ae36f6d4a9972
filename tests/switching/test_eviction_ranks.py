"""Variants that are forgotten and made again, and made ahead, train exactly as those that stay; on two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.model_zoo import VOCABULARY, llama
from tests.ranks.checks import assert_all_pass

WORLD = 2
PLANS = (
    Plan.data_parallel((0, 1), (3, 1)),
    Plan((Pipeline((Stage((0, 1), (1, 1)),)),)),
    Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
)
NAMES = ("variant0", "variant1", "variant2")
ORDER = (0, 1, 2, 0, 2, 1, 1, 0)


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_on_two_ranks(gloo_checks: Callable[..., dict[str, list[str | None]]]) -> None:
    assert_all_pass(gloo_checks(__file__, WORLD, 360), WORLD)


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def parallel(**options: Any) -> Any:
    torch.manual_seed(0)
    model: nn.Module = llama().double().train()
    return hetu_fx.auto_parallelize(model, batch(0), plan=list(PLANS), data="global", seed=1, **options)


def train(model: Any) -> list[float]:
    """Train under one variant after another, with an evaluation in between; give all losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, variant in enumerate(ORDER):
        model.hetu.switch(NAMES[variant])
        loss = model(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        for variant in (0, 1, 0, 1):
            model.hetu.switch(NAMES[variant])
            losses.append(float(model(**batch(variant)).loss))
    return losses


def happened(model: Any) -> list[tuple[str, str]]:
    return [(event.event, event.variant) for event in model.hetu.stats["graphs"]]


def check_losses_are_the_same_whatever_is_forgotten_or_made_ahead(rank: int, world: int, folder: Path) -> None:
    keeping, forgetting, ahead = (
        parallel(),
        parallel(options=hetu_fx.Options(idle_bytes=0)),
        parallel(options=hetu_fx.Options(warm=True)),
    )
    state = torch.random.get_rng_state()
    built = [("built", name) for name in NAMES]
    assert happened(ahead) == built
    assert all(parameter.grad is None for parameter in ahead.parameters())
    groups, steps = len(ahead.hetu.stats["groups"]), ahead.hetu.stats["steps"]
    ahead.hetu.warm(batch(0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (happened(ahead), steps) == (built, 0)

    expected = train(keeping)
    assert train(forgetting) == expected
    assert train(ahead) == expected
    assert happened(keeping) == built
    assert len(ahead.hetu.stats["groups"]) == groups
    assert happened(forgetting).count(("evicted", NAMES[0])) >= 3
    assert forgetting.hetu.stats["idle_bytes"] == 0
    assert 0 < keeping.hetu.stats["idle_bytes"] < 100e6


def check_what_copies_take_is_what_they_hold_besides_the_homes(rank: int, world: int, folder: Path) -> None:
    model = parallel()
    with torch.no_grad():
        for variant in (0, 1):
            model.hetu.switch(NAMES[variant])
            model(**batch(0))
    compute = model.hetu._runtime.variants[NAMES[0]].compute
    elements = sum(p.numel() - p.to_local().numel() for p in model.parameters())
    assert 8 * elements <= compute.copy_bytes <= 8 * sum(p.numel() for p in model.parameters())
    assert compute.sizes[0] >= compute.copy_bytes
    assert compute.sizes[1] >= compute.graph_bytes > 0
    limit = compute.sizes[1] + compute.sizes[0] - 1
    model.hetu._runtime.idle.limit_bytes = limit
    with torch.no_grad():
        model(**batch(0))
    assert not compute.has_copies
    assert compute.has_graphs
    assert model.hetu.stats["copies_dropped"] == 1
    assert model.hetu.stats["idle_bytes"] <= limit


def check_a_backward_goes_on_although_its_graphs_are_forgotten(rank: int, world: int, folder: Path) -> None:
    found = []
    for limit in (1 << 30, 0):
        model = parallel(options=hetu_fx.Options(idle_bytes=limit))
        model.hetu.switch(NAMES[0])
        first = model(**batch(0)).loss
        model.hetu.switch(NAMES[1])
        second = model(**batch(1)).loss
        (first + second).backward()
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    model.zero_grad()
    model.hetu.switch(NAMES[0])
    late = model(**batch(0)).loss
    model.hetu.switch(NAMES[1])
    model(**batch(1))
    model.hetu.switch_home((1,), optimizer=())
    with pytest.raises(StateError, match="home has changed"):
        late.backward()


def check_plans_that_differ_in_shares_have_their_graphs_in_common(rank: int, world: int, folder: Path) -> None:
    model = parallel()
    model(**batch(0)).loss.backward()
    name = model.hetu.add_variant(Plan.data_parallel((0, 1), (1, 3)))
    model.hetu.switch(name)
    model(**batch(1)).loss.backward()
    assert model.hetu.stats["rows"] == (1, 3)
    assert happened(model) == [("built", NAMES[0])]
    assert model.hetu.stats["first_use"][name].graph_seconds == 0
