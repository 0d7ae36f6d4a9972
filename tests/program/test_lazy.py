"""Lazy modules get shapes from the example batch, and are as on one device from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.planner.api import plan, profile
from hetu_fx.plans.plan import Plan
from hetu_fx.program.lazy import initialize_lazy


class Net(nn.Module):
    """Layers that learn how wide their inputs are, a norm that knows, and one for training alone."""

    def __init__(self, *, only_in_training: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.known = nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.BatchNorm1d(4)
        self.head, self.more = nn.LazyLinear(3), nn.LazyLinear(2) if only_in_training else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.known(self.norm(self.conv(nn.functional.dropout(x, 0.0, self.training)))).relu()
        if self.more is not None and self.training:
            y = y + self.more(y).mean(-1, keepdim=True)
        return self.head(y.flatten(1)).pow(2).mean()


def net(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).double()


def batch() -> tuple[Tensor]:
    return (torch.randn(8, 3, 7, generator=torch.Generator().manual_seed(1)).double(),)


def test_parameters_get_the_values_of_a_first_forward_and_nothing_else_changes() -> None:
    model, plain = net(), net()
    plain.eval()(*batch())
    drawn = torch.rand(1)
    held, mean, rows = model.conv.weight, model.known.running_mean, torch.random.get_rng_state
    net()
    initialize_lazy(model, batch())
    assert torch.equal(torch.rand(1), drawn)
    assert model.conv.weight is held
    assert model.known.running_mean is mean
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert model.training
    before = rows()
    initialize_lazy(model, batch())
    assert torch.equal(rows(), before)


@pytest.mark.parametrize("shares", [Plan.data_parallel((0, 1), (3, 1)), Plan.tensor_parallel((0, 1))])
def test_what_has_got_shapes_trains_as_on_one_device(shares: Plan) -> None:
    model = net()
    initialize_lazy(model, batch())
    how = Lockstep()
    made, alone = how.train(model, [batch()] * 2, shares), train_alone(model, [batch()] * 2, how)
    for name, expected in alone.state.items():
        torch.testing.assert_close(made.state[name], expected, rtol=1e-10, atol=1e-12)


def test_a_lazy_model_is_made_parallel_with_an_optimizer_that_holds_its_parameters() -> None:
    model, plain = net(), net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    net()
    hetu_fx.auto_parallelize(model, batch(), plan=Plan.single(), optimizer=optimizers[0], check=False)
    net()
    plain.eval()(*batch())
    plain.train()
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        one(*batch()).backward()
        optimizer.step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-10, atol=1e-12)


def test_what_the_example_does_not_reach_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"'more.weight'.*evaluation mode does not use them\nhint: run one forward"):
        hetu_fx.auto_parallelize(net(only_in_training=True), batch())
    with pytest.raises(StateError, match=r"'conv.weight'.*forward on the example batch fails: RuntimeError"):
        hetu_fx.auto_parallelize(net(), (torch.zeros(2).double(),))


def test_planning_runs_nothing_and_says_what_to_do() -> None:
    asked: tuple[Callable[..., object], ...] = (profile, plan)
    for ask in asked:
        with pytest.raises(StateError, match=r"'conv.weight'.*nothing is run here"):
            ask(net(), batch())
