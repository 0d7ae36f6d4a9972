"""What a trace goes on by without saying so: refused, guarded, or written into the graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import hetu_fx
from hetu_fx.check.verdict import judge
from hetu_fx.errors import CaptureError, StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan

PLANS = {"alone": Plan.single(), "rows 3:1": Plan.data_parallel((0, 1), (3, 1))}


class Net(nn.Module):
    """Two products; a subclass says what is done between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
        self.register_buffer("count", torch.zeros(3).double())
        self.aliases = [self.count]

    def made(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x)).squeeze(-1)
        return made


class Hooked(Net):
    """Halves a gradient by a hook."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        return mse_loss(self.last(h).squeeze(-1), y)


class FreezesByCall(Net):
    """Trains the first product alone."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.last.requires_grad_(False)
        return mse_loss(self.made(x), y)


class FreezesByAttribute(Net):
    """As the other, by an attribute."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.last.weight.requires_grad = False
        return mse_loss(self.made(x), y)


class WritesToAnAlias(Net):
    """Reads a buffer by another name after it was written to."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count.add_(1)
        return mse_loss(self.made(x), y) * self.aliases[0].sum()


class WritesToAView(Net):
    """Reads a buffer that is a view of one that was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", self.count[:2])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count.add_(1)
        return mse_loss(self.made(x), y) * self.mean.sum()


class Teacher(Net):
    """Has a target without gradient, from inference mode."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.made(x * 1.1)
        return mse_loss(self.made(x), y) + mse_loss(self.made(x), target.clone())


class Checkpointed(Net):
    """Computes a product again in the backward, in the old way."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(checkpoint(self.last, self.first(x), use_reentrant=True).squeeze(-1), y)


class Picked(Net):
    """Joins rows that are picked by their values."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made, likes = self.made(x), y > 0
        return torch.cat([torch.sigmoid(made[likes]), torch.sigmoid(-made[~likes])]).mean()


class Cropped(Net):
    """Reads six positions at most."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.made(x[:, :6]), y[:, :6])


class Odd(Net):
    """Doubles the loss of odd lengths."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.made(x), y) * (2 if x.shape[1] % 2 else 1)


class Squeezed(Net):
    """Drops every dim of size one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.made(x).squeeze(-1), y.squeeze(-1))


class Laid(Net):
    """Goes on by how the batch lies in memory."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.made(x if x.is_contiguous() else 2 * x), y)


class Compares(Net):
    """Goes on by how many rows there are."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.made(x), y) * (2 if x.shape[0] * x.shape[1] > 30 else 1)


def batches(*sizes: tuple[int, ...], turned: bool = False) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    made = [{"x": torch.randn(*size, 6, generator=source), "y": torch.randn(*size, generator=source)} for size in sizes]
    if turned:
        made[-1]["x"] = made[-1]["x"].transpose(0, 1).contiguous().transpose(0, 1)
    return [{name: tensor.double() for name, tensor in batch.items()} for batch in made]


ROWS, LENGTHS = batches((7,), (4,)), batches((7, 5), (4, 9), (3, 6), (2, 1))
RIGHT: dict[type[Net], list[dict[str, Tensor]]] = {
    Teacher: ROWS,
    Checkpointed: ROWS,
    Picked: ROWS,
    Cropped: LENGTHS,
    Odd: LENGTHS,
    Squeezed: LENGTHS,
    Laid: batches((7, 5), (4, 5), turned=True),
}
REFUSED: dict[type[Net], str] = {
    Hooked: r"forward registers a hook on a value \(test_unseen_by_traces.py:\d+\)",
    FreezesByCall: r"forward sets requires_grad of a parameter to False \(test_unseen_by_traces.py:\d+\)",
    FreezesByAttribute: r"forward sets requires_grad of a parameter to False",
    WritesToAnAlias: r"forward writes to 'count', and .*share memory",
    WritesToAView: r"forward writes to 'count', and 'count' and 'mean' share memory",
}


def net(kind: type[Net]) -> Any:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", RIGHT)
def test_what_a_trace_goes_on_by_is_asked_of_every_batch(kind: type[Net], plan: str) -> None:
    model, how = net(kind), Lockstep()
    alone, made = train_alone(model, RIGHT[kind], how), how.train(model, RIGHT[kind], PLANS[plan])
    verdict = judge("", alone, made, 1e-10, "")
    assert verdict.verdict == "equal", verdict


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_graph_says_is_refused(kind: type[Net]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[kind]):
        Lockstep().train(net(kind), ROWS, Plan.single())


def test_a_model_that_compares_rows_is_captured_for_either_answer() -> None:
    model, how, given = net(Compares), Lockstep(), batches((7, 5), (8, 6), (4, 5), (7, 5))
    verdict = judge("", train_alone(model, given, how), how.train(model, given, PLANS["rows 3:1"]), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_parameters_that_share_memory_are_refused() -> None:
    model = net(Teacher)
    model.other = nn.Parameter(model.first.weight.detach()[:2])
    with pytest.raises(StateError, match=r"'first.weight' and 'other' share memory and are not one parameter"):
        hetu_fx.auto_parallelize(copy.copy(model), ROWS[0], plan=Plan.single())
