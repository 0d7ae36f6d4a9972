"""Parameters and buffers that a script replaces after the call belong to the model, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from tests.program.guarded import BATCH


class Net(nn.Module):
    """A net with a batch norm, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = (self.last(self.norm(self.first(x)).relu()) - 1.0).square().mean()
        return loss


def new_head(model: Any) -> None:
    model.last = nn.Linear(4, 2)


def new_weight(model: Any) -> None:
    model.last.weight = nn.Parameter(torch.randn(2, 4))


def new_buffer(model: Any) -> None:
    model.norm.running_mean = torch.ones(4)
    model.eval()


def adapter(model: Any) -> None:
    model.first = nn.Sequential(model.first, nn.Linear(4, 4, bias=False))


CHANGES = {
    "a new head": new_head,
    "a new weight": new_weight,
    "a new buffer": new_buffer,
    "an adapter": adapter,
    "a bias less": lambda model: setattr(model.last, "bias", None),
    "freezing": lambda model: model.last.requires_grad_(False),
    "thawing": lambda model: model.first.requires_grad_(True),
}


def trained(model: nn.Module, change: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Train a step, change the model, train two; return all that it has then."""
    batch = {"x": torch.arange(12.0).reshape(4, 3).sin()}
    for number in range(3):
        if number == 1:
            torch.manual_seed(1)
            change(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("capture", ["graph", "eager"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_training_goes_on_as_on_one_device(change: Callable[[Any], Any], capture: Any) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    hetu_fx.auto_parallelize(model, BATCH, plan=hetu_fx.Plan.single(), capture=capture)
    expected, found = trained(plain, change), trained(model, change)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), rtol=1e-5, atol=1e-6)


def test_what_is_told_of_captures_says_why() -> None:
    model: Any = Net()
    hetu_fx.auto_parallelize(model, BATCH, plan=hetu_fx.Plan.single())
    trained(model, CHANGES["freezing"])
    first, second = model.hetu.stats["captures"]
    assert first.why == ()
    assert "requires_grad of 'last.weight': True -> False" in second.why
