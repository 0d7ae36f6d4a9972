"""What scripts ask of autograd at a step of two stages, and what rows these get."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.step import batches

WORLD = 2
STAGES = Plan((Pipeline((Stage((0,)), Stage((1,)))),))


class Scored(nn.Module):
    """Takes two inputs, each in another half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (x - wanted).pow(2).mean()


def batch(rows: int = 6) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(rows)
    return {name: torch.randn(rows, 4, generator=made, dtype=torch.float64) for name in ("x", "wanted")}


def pair(rank: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Make a model for both ranks, the same for this one alone, and this rank's rows."""
    torch.manual_seed(0)
    model = Scored().double().train()
    alone, own = copy.deepcopy(model), {name: value.chunk(WORLD)[rank] for name, value in batch().items()}
    return hetu_fx.auto_parallelize(model, own, plan=STAGES), alone, own


def assert_same_gradients(model: nn.Module, alone: nn.Module) -> None:
    for home, plain in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(home.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


def check_first_gradients_are_put_in_place_and_later_ones_added(rank: int, world: int, folder: Path) -> None:
    model, alone, own = pair(rank)
    for _ in range(2):
        model(**own).backward()
        alone(**batch()).backward()
        assert_same_gradients(model, alone)


def check_hooks_of_all_kinds_are_called(rank: int, world: int, folder: Path) -> None:
    model, _, own = pair(rank)
    first, last = model.layers[0].weight, model.layers[3].weight
    seen: list[str] = []
    node = last.expand_as(last).grad_fn.next_functions[0][0]
    handles = [
        first.register_hook(lambda gradient: seen.append("gradient")),
        first.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated")),
        node.register_hook(lambda *gradients: seen.append("node")),
    ]
    for handle, kinds in zip((None, *handles), (3, 2, 1, 0), strict=True):
        if handle is not None:
            handle.remove()
        seen.clear()
        model.zero_grad()
        model(**own).backward()
        assert len(set(seen)) == len(seen) == kinds, seen


def check_a_loss_that_was_changed_in_place_leads_to_all_that_it_is_made_of(rank: int, world: int, folder: Path) -> None:
    model, alone, own = pair(rank)
    beside = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for other, rows, weight in ((model, own, beside[0]), (alone, batch(), beside[1])):
        loss = other(**rows)
        loss.mul_(3).add_(weight)
        loss.backward()
    assert (beside[0].grad, beside[1].grad) == (1, 1)
    assert_same_gradients(model, alone)


def check_some_gradients_alone_are_those_that_were_asked_for(rank: int, world: int, folder: Path) -> None:
    model, alone, own = pair(rank)
    for other, rows in ((model, own), (alone, batch())):
        other(**rows).backward(inputs=[other.layers[1].weight])
    assert [one.grad is None for one in model.parameters()] == [one.grad is None for one in alone.parameters()]
    torch.testing.assert_close(model.layers[1].weight.grad.full_tensor(), alone.layers[1].weight.grad)


def check_gradients_that_a_script_keeps_stay_what_they_were(rank: int, world: int, folder: Path) -> None:
    model, alone, own = pair(rank)
    kept = []
    for _ in range(2):
        for other, rows in ((model, own), (alone, batch())):
            other.zero_grad()
            other(**rows).backward()
        kept.append([one.grad for one in model.parameters()])
    assert not {id(one) for one in kept[0]} & {id(one) for one in kept[1]}
    for earlier, later in zip(*kept, strict=True):
        earlier.add_(later)
        torch.testing.assert_close(earlier.full_tensor(), 2 * later.full_tensor())
    model(**own)  # ranks have written the same


def check_ranks_get_what_their_stage_reads(rank: int, world: int, folder: Path) -> None:
    """The first stage gets all rows of x, the last one those of what is wanted; none gets the other's."""
    model, alone, own = pair(rank)
    seen: list[set[str]] = []
    fetch = batches.rows_for_pipeline

    def watched(*what: Any, **how: Any) -> dict[str, Tensor]:
        seen.append(set(found := fetch(*what, **how)))
        assert {tuple(one.shape) for one in found.values()} == {(6, 4)}
        return found

    with mock.patch.object(batches, "rows_for_pipeline", watched):
        model(**own).backward()
    alone(**batch()).backward()
    assert seen == [{("x", "wanted")[rank]}]
    assert_same_gradients(model, alone)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_two_stages(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
