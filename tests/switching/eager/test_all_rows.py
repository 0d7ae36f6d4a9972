"""Modules that run on all rows on each replica: training is that of one device, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize

from hetu_fx.check.verdict import judge
from hetu_fx.errors import DivergedError, StateError
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.eager.random_numbers import RandomNumbers
from hetu_fx.switching.eager.row_mode import BY_ROWS, NOT_KNOWN, RowMode

SHARES = Plan.data_parallel((0, 1), (3, 1))
SOME = Plan.data_parallel((2, 0), (3, 1))
WIDTH = 4


class Contrast(nn.Module):
    """Holds every row against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        rows = normalize(self.first(x), dim=-1)
        return cross_entropy(5 * rows @ normalize(x, dim=-1).T, torch.arange(len(x)))


class OfTokens(Contrast):
    """Returns a mean over tokens, of which rows have unequal numbers."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        loss: Tensor = (self.first(x).square().sum(-1) * tokens).sum() / tokens.sum()
        return loss


class Normed(Contrast):
    """Works out statistics of the batch, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        loss: Tensor = self.norm(self.first(x)).pow(3).mean()
        return loss


class Branches(Contrast):
    """Goes on by a sum over the batch."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        made = self.first(x)
        loss: Tensor = made.square().mean() if float(x.sum()) > 0 else made.abs().mean()
        return loss


class Draws(Contrast):
    """Draws from every generator there is."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        made = dropout(self.first(x + torch.randn_like(x)), 0.5)
        loss: Tensor = made.square().mean() * (1 + random.random()) * (1 + numpy.random.rand())
        return loss


class Counts(Contrast):
    """Counts its calls in Python."""

    calls = 0

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, tokens) * self.calls


class Several(Contrast):
    """Returns outputs by row, with none, and a plain number."""

    def forward(self, x: Tensor, tokens: Tensor) -> Mapping[str, Any]:
        made = self.first(x)
        return {"loss": super().forward(x, tokens), "rows": made, "most": made.max(), "count": len(x)}


KINDS = (Contrast, OfTokens, Normed, Branches, Draws, Counts, Several)


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batches(*rows: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(4)
    made = [torch.randn(count, WIDTH, generator=source, dtype=torch.float64) for count in rows]
    return [{"x": x, "tokens": torch.arange(1, len(x) + 1).double()} for x in made]


def seeded(train: Callable[[], Trained]) -> Trained:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    return train()


def verdict(model: nn.Module, given: Sequence[Mapping[str, Tensor]], plan: Plan, how: Lockstep) -> str:
    alone = seeded(lambda: train_alone(model, given, how))
    return judge("plan", alone, seeded(lambda: how.train(model, given, plan)), 1e-10, "").verdict


@pytest.mark.parametrize("rows", [None, (5, 3), (8, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_all_rows_is_that_of_one_device(kind: type[nn.Module], rows: tuple[int, ...] | None) -> None:
    assert verdict(make(kind), batches(8, 7, 8), SHARES, Lockstep(eager=NOT_KNOWN, rows=rows)) == "equal"


@pytest.mark.parametrize("kind", [Contrast, Draws])
def test_ranks_that_the_plan_leaves_out_bring_rows_and_hold_parameters(kind: type[nn.Module]) -> None:
    assert verdict(make(kind), batches(9, 5), SOME, Lockstep(eager=NOT_KNOWN, rows=(2, 4, 3))) == "equal"


@pytest.mark.parametrize("kind", [Contrast, OfTokens, Branches, Draws])
def test_by_rows_they_would_be_wrong(kind: type[nn.Module]) -> None:
    assert verdict(make(kind), batches(8, 7), SHARES, Lockstep(eager=BY_ROWS, rows=(5, 3))) == "differs"


def test_by_rows_statistics_of_a_batch_would_be_each_replica_s_own() -> None:
    with pytest.raises(DivergedError, match=r"another copy of 'norm\.running_mean'"):
        Lockstep(eager=BY_ROWS, rows=(5, 3)).train(make(Normed), batches(8), SHARES)


class Adds(Contrast):
    """Returns a sum over rows."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        loss: Tensor = self.first(x).square().sum() / 10
        return loss


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("rows", [None, (5, 3)], ids=str)
def test_a_sum_over_rows_is_shared_out_among_ranks_that_bring_their_own(
    rows: tuple[int, ...] | None, by_rows: bool
) -> None:
    model, given = make(Adds), batches(8)
    how = Lockstep(None, eager=RowMode(by_rows, adds_up=True, why="" if by_rows else "it is said"), rows=rows)
    (alone,), (made,) = train_alone(model, given, how).steps, how.train(model, given, SHARES).steps
    part = 1.0 if rows is None else 0.5
    torch.testing.assert_close(made.loss, alone.loss * part)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(made.gradients[name], gradient * part, rtol=1e-10, atol=0)


class Strays(Contrast):
    """Makes something else in every call, whatever it is given."""

    calls = 0

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        Strays.calls += 1
        return super().forward(x, tokens) * Strays.calls


def test_replicas_that_make_other_values_of_the_same_rows_are_refused() -> None:
    with pytest.raises(StateError, match=r"other values of it: .* amount to \{0: .*\nhint: let the module follow from"):
        Lockstep(eager=NOT_KNOWN, rows=(5, 3)).train(make(Strays), batches(8), SHARES)


def test_generators_go_on_where_they_were() -> None:
    host = torch.device("cpu")
    first, own = RandomNumbers.of(host), RandomNumbers.of(host)
    drawn = torch.rand(3), random.random(), numpy.random.rand()
    own = RandomNumbers.of(host)
    with first.drawn(host):
        again = torch.rand(3), random.random(), numpy.random.rand()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
    assert RandomNumbers.of(host) == own
