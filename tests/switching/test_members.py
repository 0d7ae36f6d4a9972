"""Parameters and buffers that a script replaces after the call belong to the model, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.switching.home.tensor import HomeTensor
from tests.program.guarded import BATCH
from tests.switching.in_threads import runtime_of


class Net(nn.Module):
    """A net with a batch norm, or without, and a loss."""

    def __init__(self, has_norm: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if has_norm else nn.Identity()
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


def trained(
    model: nn.Module, change: Callable[[Any], Any], call: Callable[..., Tensor] | None = None
) -> dict[str, Tensor]:
    """Train a step, change the model, train two; return all that it has then."""
    batch = {"x": torch.arange(12.0).reshape(4, 3).sin()}
    for number in range(3):
        if number == 1:
            torch.manual_seed(1)
            change(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        (call or model)(**batch).backward()
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


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"a new buffer"}))
def test_training_of_two_replicas_goes_on_as_on_one_device(change: str) -> None:
    torch.manual_seed(0)
    plain = Net(has_norm=False)

    def found(table: GroupTable) -> dict[str, Tensor]:
        model = copy.deepcopy(plain)
        runtime = runtime_of(table, model, BATCH)
        made = trained(model, CHANGES[change], lambda **batch: runtime.run((), batch))
        assert all(isinstance(parameter, HomeTensor) for parameter in model.parameters())
        return {name: hetu_fx.full_tensor(value).detach() for name, value in made.items()}

    replicas = run_in_threads(2, found)
    for name, value in trained(copy.deepcopy(plain), CHANGES[change]).items():
        for replica in replicas:
            torch.testing.assert_close(replica[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_what_is_told_of_captures_says_why() -> None:
    model: Any = Net()
    hetu_fx.auto_parallelize(model, BATCH, plan=hetu_fx.Plan.single())
    trained(model, CHANGES["freezing"])
    first, second = model.hetu.stats["captures"]
    assert first.why == ()
    assert "requires_grad of 'last.weight': True -> False" in second.why
