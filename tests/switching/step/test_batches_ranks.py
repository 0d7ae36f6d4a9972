"""Batches with plain values that differ by rank, on two gloo ranks, against the same model on one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import hetu_fx
from hetu_fx.errors import BatchError
from hetu_fx.plans.plan import Plan
from tests.ranks.checks import assert_all_pass

WORLD = 2


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_on_two_ranks(gloo_checks: Callable[..., dict[str, list[str | None]]]) -> None:
    assert_all_pass(gloo_checks(__file__, WORLD, 180), WORLD)


class Named(nn.Module):
    """Takes a whole batch as it comes from a loader, and returns which files its rows are of."""

    def __init__(self, read: Callable[[dict[str, Any]], float] = lambda batch: 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.read = read

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        made = self.layers(batch["x"])
        loss = nn.functional.cross_entropy(made, batch["y"]) * self.read(batch)
        return {"loss": loss, "logits": made, "path": batch["path"], "tag": batch["meta"]["tag"]}


def samples(count: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 3, generator=random, dtype=torch.float64), torch.arange(count) % 2
    return [{"x": x[i], "y": y[i], "path": f"{i}.png", "meta": {"tag": f"t{i}"}} for i in range(count)]


def named(plan: Plan, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Named(**options).double()
    plain, example = copy.deepcopy(model), default_collate(samples(2))
    return hetu_fx.auto_parallelize(model, ({**example},), plan=plan, outputs="all"), plain


def check_files_names_come_back_and_differ_by_rank(rank: int, world: int, folder: Path) -> None:
    model, plain = named(Plan.data_parallel((0, 1), (3, 1)))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    everything = samples(14)
    mine = [everything[i] for i in range(14) if i // 2 % 2 == rank]  # rank 1 has one batch less
    for step, batch in enumerate(DataLoader(mine, batch_size=2)):
        if 4 * step + 4 > len(everything):
            break
        output, expected = model(batch), plain(default_collate(everything[4 * step : 4 * step + 4]))
        assert (output["path"], output["tag"]) == (batch["path"], batch["meta"]["tag"])
        torch.testing.assert_close(output["loss"], expected["loss"], rtol=1e-10, atol=1e-12)
        own = expected["logits"][2 * rank : 2 * rank + 2]
        torch.testing.assert_close(output["logits"], own, rtol=1e-10, atol=1e-12)
        for one, optimizer in zip((output, expected), optimizers, strict=True):
            one["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(model.hetu.stats["captures"]) == 1
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter.data, rtol=1e-10, atol=1e-12)


def check_a_name_that_is_read_and_differs_by_rank_is_refused_in_few_words(rank: int, world: int, folder: Path) -> None:
    model, _ = named(Plan.data_parallel((0, 1)), read=lambda batch: float(len(batch["path"])))
    own = default_collate(samples(4)[2 * rank : 2 * rank + 2])
    with pytest.raises(BatchError, match=r"input 'batch\.path' is .*0\.png.* on rank 0, .*2\.png.* on rank 1\. rank 0"):
        model(own)
