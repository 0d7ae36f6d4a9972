"""Tables that ask for sparse gradients train as on one device, where these are dense between ranks."""

from __future__ import annotations

import warnings
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetu_fx
from hetu_fx.errors import StateError
from hetu_fx.lockstep import Lockstep, MakeOptimizer, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.prepare import _check_optimizer
from hetu_fx.switching.graph_execution import GraphExecution

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SHARES = Plan.data_parallel((0, 1), (3, 1))
PLANS = {
    "alone": Plan.single(),
    "alone, two micro-batches": Plan((Pipeline((Stage((0,)),), micro_batches=2),)),
    "shares": SHARES,
    "shares, zero 0": Plan(SHARES.pipelines, zero=0),
    "group": Plan.tensor_parallel((0, 1)),
    "group beside one": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),)))),
}


class Tables(nn.Module):
    """A table of tokens, of which one is padding, and bags of others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 6, sparse=True, padding_idx=2)
        self.bags = nn.EmbeddingBag(12, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        picked = self.tokens(ids).mean(1)
        return cross_entropy(self.head(picked + picked.gather(1, ids, sparse_grad=True).sum(1, keepdim=True)), y)


class WithBags(Tables):
    """The same, with bags."""

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.tokens(ids).mean(1) * self.bags(ids)), y)


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(number)
    return torch.randint(0, 6, (8, 5), generator=source), torch.randint(0, 4, (8,), generator=source)


@cache
def case(kind: type[Tables]) -> tuple[Tables, GraphExecution]:
    torch.manual_seed(0)
    model = kind().double()
    return model, Lockstep().capture(model, batch(0))


def differences(kind: type[Tables], plan: Plan, optimizer: MakeOptimizer) -> float:
    model, captured = case(kind)
    how, batches = Lockstep(make_optimizer=optimizer), [batch(0), batch(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, alone = how.train(model, batches, plan, captured), train_alone(model, batches, how)
    pairs = [(made.state[name], expected) for name, expected in alone.state.items()]
    for one, other in zip(made.steps, alone.steps, strict=True):
        assert one.gradients.keys() == other.gradients.keys()
        pairs += [(one.gradients[name], expected) for name, expected in other.gradients.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("plan", PLANS)
def test_sparse_gradients_are_those_of_one_device(plan: str) -> None:
    assert differences(Tables, PLANS[plan], MOMENTUM) < 1e-10


@pytest.mark.parametrize("plan", ["alone", "shares", "group"])
def test_bags_are_those_of_one_device(plan: str) -> None:
    assert differences(WithBags, PLANS[plan], partial(torch.optim.Adagrad, lr=0.1)) < 1e-10


def test_dense_gradients_in_the_place_of_sparse_ones_are_told_with_the_line() -> None:
    model, captured = case(Tables)
    with pytest.warns(UserWarning, match=r"asked for as sparse are dense.*test_place.py:\d+"):
        Lockstep().train(model, [batch(0)], SHARES, captured)


def test_an_optimizer_of_sparse_gradients_alone_is_refused_on_several_ranks() -> None:
    optimizer = torch.optim.SparseAdam(nn.Embedding(4, 2, sparse=True).parameters())
    with pytest.raises(StateError, match="SparseAdam takes sparse gradients alone, but on 2 ranks gradients are dense"):
        _check_optimizer(optimizer, 2)
    _check_optimizer(optimizer, 1)
    _check_optimizer(MOMENTUM(nn.Linear(2, 2).parameters()), 2)


def test_on_one_rank_it_trains_as_ever() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(12, 6, sparse=True)

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.tokens(ids).mean(1), y)

    model, plain = Alone(), Alone()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SparseAdam(one.parameters(), lr=0.1) for one in (model, plain)]
    hetu_fx.auto_parallelize(model, batch(0), plan=Plan.single(), optimizer=optimizers[0], check=False)
    for number in range(2):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one(*batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.tokens.weight, plain.tokens.weight)
