"""Losses of every kind have the value and the gradients of one device, whether or not they are recognised as means."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.errors import PlanError
from hetu_fx.lockstep import Lockstep, Step, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.loss_type import LossType
from hetu_fx.switching.graph_execution import GraphExecution

Loss = Callable[["Encoder", Tensor, Tensor], Tensor]

ROWS, TOKENS, WIDTH, CLASSES = (3, 1), 8, 6, 4


class Encoder(nn.Module):
    """A layer, a head, and a loss of what the layer makes: hidden values of (rows, tokens, width)."""

    weights: Tensor

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.conv = nn.Conv1d(WIDTH, 4, 3, stride=2)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.layer(x)), y)

    def each(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token."""
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")

    def weighted(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the mean loss, by weights of classes."""
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels, weight=weights)


def by_detached_losses(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    each = m.each(h, y)
    return (each * each.detach()).sum() / each.detach().sum()


def by_relative_losses(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    each = m.each(h, y)
    weights = each.detach() / each.detach().mean()
    return (each * weights).mean()


def by_inverse_frequency(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    return m.weighted(h, y, 1 / (F.one_hot(y, CLASSES).sum((0, 1)).to(h.dtype) + 1))


def by_bins(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    return m.weighted(h, y, 1 / (torch.bincount(y.flatten(), minlength=CLASSES).to(h.dtype) + 1))


def r_squared(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    target = y.to(h.dtype)
    return (h.mean(-1) - target).square().sum() / (target - target.mean()).square().sum()


def relative_weights(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    given = y.to(h.dtype) + 0.5
    weights = given / given.mean()
    return (weights * h.mean(-1)).sum() / weights.sum()


def variance_and_covariance(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    rows = h.mean(1)
    centred = rows - rows.mean(0)
    covariance = centred.t() @ centred / (rows.shape[0] - 1)
    return F.relu(1 - torch.sqrt(rows.var(0) + 1e-4)).mean() + covariance.square().sum() / WIDTH


def standardized(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    spread = (h - h.mean(0, keepdim=True)) / (h.std(0, keepdim=True) + 1)
    return m.weighted(torch.tanh(m.layer(spread)), y, m.weights)


def attending_rows(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    rows = h.mean(1)
    attended = torch.softmax(rows @ rows.t(), -1) @ rows
    return F.cross_entropy(m.head(m.layer(attended)), y[:, 0])


def of_pooled_nodes(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(CLASSES, WIDTH, dtype=h.dtype).index_add(0, y.reshape(-1), h.reshape(-1, WIDTH)).square().mean()


def of_spectra(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    signals, window = h.transpose(1, 2).reshape(-1, TOKENS), torch.ones(4, dtype=h.dtype)
    return torch.stft(signals, 4, 2, window=window, return_complex=True).abs().mean()


def by_sorted_labels(m: Encoder, h: Tensor, y: Tensor) -> Tensor:
    chosen = (y[y.sum(1).argsort()][:, 0] < 2).to(h.dtype)
    return (h.mean((1, 2)) * chosen).sum() / chosen.sum()


SUMS: dict[str, Loss] = {
    "sum": lambda m, h, y: h.square().sum(),
    "sum over a given number": lambda m, h, y: m.each(h, y).sum() / 17,
    "sum of means of rows": lambda m, h, y: h.square().mean((1, 2)).sum(),
    "sum times a parameter": lambda m, h, y: h.square().sum() * m.layer.bias.exp().sum(),
}
OTHERS: dict[str, Loss] = {
    "weights in a buffer": lambda m, h, y: m.weighted(h, y, m.weights),
    "labels of its own": lambda m, h, y: m.weighted(h, m.head(h).argmax(-1), m.weights),
    "strided convolution": lambda m, h, y: m.conv(h.transpose(1, 2)).square().mean(),
    "average pool": lambda m, h, y: F.avg_pool1d(h.transpose(1, 2), 3, 2).square().mean(),
    "every other token": lambda m, h, y: h[:, ::2].square().mean(),
    "tokens put together": lambda m, h, y: h.reshape(h.shape[0], h.shape[1] // 4, 4 * WIDTH).square().mean(),
    "windows": lambda m, h, y: h.unfold(1, 3, 2).square().mean(),
    "spectra": of_spectra,
    "deviation": lambda m, h, y: h.std(0).mean(),
    "log of a sum": lambda m, h, y: h.logsumexp(0).mean(),
    "a norm of pairs of tokens": lambda m, h, y: torch.linalg.vector_norm(h @ h.mT) / (h @ h.mT).numel(),
    "quantile": lambda m, h, y: h.flatten().quantile(0.3),
    "median": lambda m, h, y: h.flatten().median(),
    "norm": lambda m, h, y: h.norm(),
    "gram matrix": lambda m, h, y: (h.mean(1).t() @ h.mean(1)).square().sum(),
    "divided by detached losses": by_detached_losses,
    "weighed by relative losses": by_relative_losses,
    "sum and a penalty": lambda m, h, y: h.square().sum() + m.layer.weight.square().sum(),
    "inverse frequencies": by_inverse_frequency,
    "inverse frequencies by bins": by_bins,
    "r squared": r_squared,
    "relative weights of the batch": relative_weights,
    "numbers of rows": lambda m, h, y: (h.mean((1, 2)) * torch.arange(h.shape[0])).sum(),
    "numbers of rows as shares": lambda m, h, y: (h.mean((1, 2)) * torch.arange(h.shape[0]) / h.shape[0]).mean(),
    "root of the number of rows": lambda m, h, y: h.square().sum() / h.shape[0] ** 0.5,
    "contrast": lambda m, h, y: F.cross_entropy(h.mean(1) @ h.mean(1).t(), torch.arange(h.shape[0])),
    "hardest rows": lambda m, h, y: m.each(h, y).mean(1).topk(2).values.mean(),
    "largest row": lambda m, h, y: h.mean((1, 2)).max(),
    "standardized rows": standardized,
    "variance and covariance": variance_and_covariance,
    "sums up to each row": lambda m, h, y: h.mean((1, 2)).cumsum(0).square().mean(),
    "rows turned": lambda m, h, y: (h * h.roll(1, 0)).mean(),
    "rows reversed": lambda m, h, y: (h * h.flip(0)).square().mean(),
    "against the first row": lambda m, h, y: (h - h[0]).square().mean(),
    "triplets": lambda m, h, y: F.triplet_margin_loss(h.mean(1), h.mean(1).roll(1, 0), h.mean(1).flip(0)),
    "rows that attend to each other": attending_rows,
    "nodes of one graph": of_pooled_nodes,
    "chosen tokens": lambda m, h, y: m.each(h, y)[y > 1].mean(),
    "sorted labels": by_sorted_labels,
    "root of a mean": lambda m, h, y: h.square().mean().sqrt(),
    "product of means": lambda m, h, y: h.square().mean() * h.abs().mean(),
}
LOSSES = SUMS | OTHERS
BY_ORDER = {"rows reversed", "against the first row"}  # as steps of time would be: which dim has the rows is to be said

PLANS = {
    "rows 3:1": Plan.data_parallel((0, 1), ROWS),
    "tensor parallel": Plan.tensor_parallel((0, 1)),
    "mixed": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),)))),
}


@cache
def prepared(name: str) -> tuple[Encoder, dict[str, Tensor], Step, GraphExecution]:
    """Return a model, a batch, what one device makes of them, and the captured model."""
    torch.manual_seed(0)
    model = Encoder(LOSSES[name]).double()
    rows = sum(ROWS)
    batch = {"x": torch.randn(rows, TOKENS, WIDTH).double(), "y": torch.randint(0, CLASSES, (rows, TOKENS))}
    return model, batch, train_alone(model, [batch], Lockstep()).steps[0], lockstep(name).capture(model, batch)


def lockstep(name: str, rows: tuple[int, ...] | None = None) -> Lockstep:
    return Lockstep(rows=rows, row_dims={"x": 0, "y": 0} if name in BY_ORDER else {})


def trained(name: str, plan: Plan) -> tuple[Step, Step, int]:
    """Return a step of one device, one of all ranks of a plan, and how many ranks these are."""
    model, batch, alone, captured = prepared(name)
    ranks = 1 + max(plan.devices)
    rows = (*ROWS, *(0,) * (ranks - len(ROWS)))
    return alone, lockstep(name, rows).train(model, [batch], plan, captured).steps[0], ranks


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_one_device_or_a_sums_part_of_it(name: str, plan: str) -> None:
    alone, found, ranks = trained(name, PLANS[plan])
    divisor = ranks if name in SUMS else 1
    assert found.loss == pytest.approx(alone.loss / divisor, rel=1e-10)
    for parameter, gradient in alone.gradients.items():
        got = found.gradients.get(parameter, torch.zeros(()))
        torch.testing.assert_close(got * divisor, gradient, rtol=1e-9, atol=1e-11, msg=f"{parameter} under {plan}")


@pytest.mark.parametrize("name", LOSSES)
def test_only_proven_sums_are_sums(name: str) -> None:
    *_, captured = prepared(name)
    program = captured.programs.current
    assert program is not None
    assert (program.loss_type is LossType.SUM) == (name in SUMS)


@pytest.mark.parametrize("name", ["deviation", "contrast", "largest row"])
def test_micro_batches_are_refused_by_the_name_of_the_op_in_which_rows_meet(name: str) -> None:
    model, batch, _, captured = prepared(name)
    plan = Plan((Pipeline((Stage((0,)),), share=3, micro_batches=2), Pipeline((Stage((1,)),))))
    with pytest.raises(PlanError, match=r"test_where_rows_meet\.py"):
        Lockstep(rows=ROWS).train(model, [batch], plan, captured)


class Shifted(nn.Module):
    """Has a loss of all classes of all rows together, of which tensor parallelism cuts the classes."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4, 4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x - self.shift).flatten(1)).flatten().logsumexp(0)


@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_stand_in_a_dim_with_what_is_cut_are_gathered(plan: str) -> None:
    torch.manual_seed(0)
    model, batch = Shifted().double(), {"x": torch.randn(sum(ROWS), 4, 4).double()}
    alone = train_alone(model, [batch], Lockstep()).steps[0]
    found = Lockstep().train(model, [batch], PLANS[plan]).steps[0]
    assert found.loss == pytest.approx(alone.loss, rel=1e-12)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-14)


class Quantised(nn.Module):
    """Takes the nearest entry of a table for each vector, and is whole on each replica: cdist fixes its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.3 * torch.randn(4, 3))
        self.back, self.last = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            nearest = self.table[torch.cdist(x.reshape(-1, 3), self.table).argmin(-1)].view_as(x)
            x = x + 0.5 * self.back((x + (nearest - x).detach() + 0.1 * nearest).flatten(1)).view(-1, 4, 3)
        return self.last(x.flatten(1))[:, ::2].square().mean()


def test_copies_of_a_parameter_whose_gradient_each_replica_has_whole_stay_the_same_bits() -> None:
    torch.manual_seed(0)
    plan = Plan((Pipeline((Stage((1,)),)), Pipeline((Stage((2,)),)), Pipeline((Stage((0, 3)),))), zero=0)
    model, batches = Quantised().double(), [{"x": torch.randn(rows, 4, 3).double()} for rows in (6, 9)]
    alone, found = train_alone(model, batches, Lockstep()), Lockstep().train(model, batches, plan)
    for name, value in alone.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-10, atol=1e-12)
