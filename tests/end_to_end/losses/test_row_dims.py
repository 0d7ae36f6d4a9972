"""Inputs whose rows are not dim 0, under plans, against one device: in lock-step, and as processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import BatchError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.ranks.outputs import Ranks

TOLERANCE = 1e-12
OWN = (slice(0, 1), slice(1, 4))  # the rows of two ranks
ROWS = Plan.data_parallel((0, 1), (3, 1))
MIXED = Plan((Pipeline((Stage((0, 1)),), 3), Pipeline((Stage((2,)),), 1)))
STAGES = Plan((Pipeline((Stage((0,), blocks=1), Stage((1,), blocks=1)), 3, 2), Pipeline((Stage((2,)),), 1, 1)))


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


class Recurrent(nn.Module):
    """Time-first, with the state of its layers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], y: Tensor) -> dict[str, Any]:
        out, (hidden, cell) = self.cells(x, state)
        return {"loss": nn.functional.cross_entropy(self.head(out[-1]), y), "state": (hidden, cell), "out": out}


class Translates(nn.Module):
    """Time-first attention, self and across, under a mask that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Transformer(8, 2, 1, 1, 16, 0.0), nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor, y: Tensor) -> dict[str, Tensor]:
        made = self.head(self.body(source, target, tgt_mask=mask, tgt_is_causal=False))
        return {"loss": nn.functional.cross_entropy(made.flatten(0, 1), y.flatten()), "made": made}


class Encodes(nn.Module):
    """Two time-first blocks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.body(x)[0]), y)}


class Scores(nn.Module):
    """Leaves the loss to others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(x)


def causal(size: int) -> Tensor:
    return torch.full((size, size), float("-inf"), dtype=torch.float64).triu(1)


CASES: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, int | None]]] = {
    "recurrent": (Recurrent, {"x": made(7, 4, 6), "state": (made(2, 4, 5), made(2, 4, 5)), "y": labels(4)}, {"x": 1}),
    "as many rows as layers": (
        Recurrent,
        {"x": made(7, 2, 6), "state": (made(2, 2, 5), made(2, 2, 5)), "y": labels(2)},
        {"x": 1, "state": 1},
    ),
    "attention": (
        Translates,
        {"source": made(7, 4, 8), "target": made(4, 4, 8), "mask": causal(4), "y": labels(4, 4)},
        {"source": 1, "target": 1, "mask": None, "y": 1},
    ),
}


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def assert_equals_one_device(model: nn.Module, batch: Mapping[str, Any], plan: Plan, how: Lockstep) -> None:
    alone, trained = train_alone(model, [batch, batch], how), how.train(model, [batch, batch], plan)
    for one, other in zip(alone.steps, trained.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, abs=TOLERANCE)
        for name, gradient in one.gradients.items():
            torch.testing.assert_close(other.gradients[name], gradient, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("plan", [ROWS, MIXED], ids=["rows", "mixed"])
@pytest.mark.parametrize("case", list(CASES))
def test_time_first_training_is_that_of_one_device(case: str, plan: Plan) -> None:
    kind, batch, row_dims = CASES[case]
    assert_equals_one_device(model_of(kind), batch, plan, Lockstep(row_dims=row_dims))
    rows = [2, 2, 0] if plan is MIXED else [1, 3]
    assert_equals_one_device(model_of(kind), batch, plan, Lockstep(row_dims=row_dims, rows=rows))


def test_micro_batches_and_stages_take_rows_of_any_dim() -> None:
    batch, how = {"x": made(5, 8, 8), "y": labels(8)}, Lockstep(row_dims={"x": 1, "y": 0}, rows=[1, 3, 4])
    assert_equals_one_device(model_of(Encodes), batch, STAGES, how)


def test_outputs_come_back_as_each_ranks_own_rows_in_the_dim_that_counts_them() -> None:
    kind, batch, row_dims = CASES["recurrent"]
    model = model_of(kind)
    plain = model(**batch)
    outputs = Ranks(ROWS, row_dims=row_dims).call(model, [_own(0, batch), _own(1, batch)])
    for output, rows in zip(outputs, OWN, strict=True):
        torch.testing.assert_close(output["loss"] + 0, plain["loss"])
        torch.testing.assert_close(output["out"], plain["out"][:, rows])
        torch.testing.assert_close(output["state"][1], plain["state"][1][:, rows])


def test_a_mask_that_differs_between_ranks_is_told() -> None:
    kind, batch, row_dims = CASES["attention"]
    own = [batch, {**batch, "mask": torch.zeros(4, 4, dtype=torch.float64)}]
    with pytest.raises(BatchError, match=r"input 'mask' is \[0, -inf"):
        Ranks(ROWS, row_dims=row_dims).call(model_of(kind), own)


def _own(rank: int, batch: Mapping[str, Any]) -> dict[str, Any]:
    rows = OWN[rank]
    return {"x": batch["x"][:, rows], "state": tuple(one[:, rows] for one in batch["state"]), "y": batch["y"][rows]}


def check_processes_train_as_one_device_does_captured_or_not(rank: int, world: int, folder: Path) -> None:
    kind, batch, row_dims = CASES["recurrent"]
    for capture in ("graph", "eager"):
        model, own = model_of(kind), _own(rank, batch)
        alone = copy.deepcopy(model)
        asked = {**row_dims, "state": 1}
        hetu_fx.auto_parallelize(model, own, plan=ROWS, row_dims=asked, capture=capture, outputs="all")
        one, whole = model(**own), alone(**batch)
        one["loss"].backward()
        whole["loss"].backward()
        torch.testing.assert_close(one["state"][0], whole["state"][0][:, OWN[rank]])
        torch.testing.assert_close(one["loss"].detach() + 0, whole["loss"].detach())
        for home, plain in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(home.grad.full_tensor(), plain.grad, rtol=1e-10, atol=1e-12)


def check_gradients_of_inputs_come_back_in_the_dim_of_their_rows(rank: int, world: int, folder: Path) -> None:
    kind, batch, row_dims = CASES["recurrent"]
    model, own = model_of(kind), _own(rank, batch)
    alone, whole = copy.deepcopy(model), {**batch, "x": batch["x"].clone().requires_grad_()}
    own["x"] = own["x"].clone().requires_grad_()
    hetu_fx.auto_parallelize(model, own, plan=ROWS, row_dims=row_dims)
    model(**own)["loss"].backward()
    alone(**whole)["loss"].backward()
    rows = OWN[rank]
    torch.testing.assert_close(own["x"].grad, world * whole["x"].grad[:, rows], rtol=1e-10, atol=1e-12)


def check_weights_of_a_loss_that_differ_between_ranks_are_told(rank: int, world: int, folder: Path) -> None:
    model, batch = Scores().double(), {"x": made(4, 6), "y": labels(4)}
    weight = torch.tensor([1.0, 2.0, 3.0 + rank], dtype=torch.float64)

    def loss_fn(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y, weight)

    hetu_fx.auto_parallelize(model, batch, plan=ROWS, loss_fn=loss_fn)
    with pytest.raises(BatchError, match=r"constant \S+ is \[1, 2, 3\].* on rank 0, \[1, 2, 4\].* on rank 1"):
        model(**batch)


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_as_processes(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, 2)[name] if report]
    assert not failures, "\n".join(failures)
