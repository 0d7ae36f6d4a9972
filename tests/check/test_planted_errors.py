"""Errors of the kinds by which plans have been wrong without a word, each planted again: the trial tells of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hetu_fx.base import dtypes
from hetu_fx.check.checker import Checker
from hetu_fx.errors import CheckError
from hetu_fx.graph.functional import _Functionalizer
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs
from hetu_fx.program.loss_type import LossType
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.rewrites import all_rows, counts
from tests.check.nets import SHARES

Batch = dict[str, Tensor]
UNLIKE = Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),))))
Plant = Callable[[pytest.MonkeyPatch], None]


class Net(nn.Module):
    """Two products; a subclass says what comes of their rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 4)

    def rows(self, x: Tensor) -> Tensor:
        """Return what is made of each row."""
        return self.second(torch.relu(self.first(x)))


class Strided(Net):
    """Its loss is a mean over every second number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.rows(x)[:, ::2] - y[:, ::2]).square().mean()


class Frequencies(Net):
    """Weighs classes by how seldom the batch has them."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = 1 / (1 + nn.functional.one_hot(labels, 4).sum(0))
        return cross_entropy(self.rows(x), labels, weight=weights.to(x.dtype))


class Filtered(Net):
    """Filters frequencies by complex parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=self.first.out_features)
        return mse_loss(self.second(made), y)


class RootOfRows(Net):
    """Divides by the root of the number of rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.rows(x) - y).square().sum() / x.shape[0] ** 0.5


class Activated(Net):
    """Activates in place some columns of what a norm over the batch has made, and reads all."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.norm(self.first(x))
        made[:, :4].relu_()
        return mse_loss(self.second(made), y)


class Centred(Net):
    """Scales rows by their mean, which all have before products that are cut in one replica only."""

    def __init__(self, width: int) -> None:
        super().__init__(8 * width)
        self.before = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.before(x)
        return mse_loss(self.rows(made * made.mean(0, keepdim=True).exp()), y)


def a_loss_that_is_not_proven_is_a_sum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hetu_fx.program.program.loss_type", lambda *given: LossType.SUM)


def counts_add_up_whatever_is_in_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(counts, "_is_row_local", lambda *given: True)


def complex_numbers_carry_no_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dtypes.carries_gradient, "__code__", dtypes.is_real.__code__)


def a_replica_counts_its_own_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(all_rows._Gathering, "_read_numbers", lambda self, node: None)


def what_replicas_exchange_stays_in_summands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AxisDeduction, "exchanged", property(lambda self: ()))


def a_norm_is_read_before_it_is_written_to(patch: pytest.MonkeyPatch) -> None:
    class AtOnce(dict):  # type: ignore[type-arg]
        def update(self, outputs: dict[torch.fx.Node, torch.fx.Node]) -> None:  # type: ignore[override]
            for norm, output in outputs.items():
                norm.replace_all_uses_with(output)

    right = _Functionalizer.__init__

    def planted(self: _Functionalizer, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]
        self.replaced = AtOnce()

    patch.setattr(_Functionalizer, "__init__", planted)


def pairs() -> Batch:
    source = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 6, generator=source), "y": torch.randn(8, 4, generator=source)}


def labelled() -> Batch:
    return {"x": pairs()["x"], "labels": torch.tensor([0, 0, 1, 0, 2, 3, 1, 0])}


def checker_of(model: nn.Module, batch: Batch, folder: Path) -> Checker:
    execution = GraphExecution(Programs(model, None), batch, None)
    return Checker(model, None, batch, execution, world=3, shared=False, folder=folder, seconds=120.0)


CASES: dict[str, tuple[Plant, Callable[[int], nn.Module], Batch, Plan]] = {
    "A1, no sum": (a_loss_that_is_not_proven_is_a_sum, Strided, pairs(), SHARES),
    "A2, counts of counts": (counts_add_up_whatever_is_in_them, Frequencies, labelled(), SHARES),
    "A3, complex numbers": (complex_numbers_carry_no_gradient, Filtered, pairs(), SHARES),
    "A7, numbers of rows": (a_replica_counts_its_own_rows, RootOfRows, pairs(), SHARES),
    "A9, writes after a norm": (a_norm_is_read_before_it_is_written_to, Activated, pairs(), SHARES),
    "A11, halves of a cotangent": (what_replicas_exchange_stays_in_summands, Centred, pairs(), UNLIKE),
}


@pytest.mark.parametrize("kind", CASES)
def test_an_error_of_a_kind_that_went_unseen_is_told(kind: str, tmp_path: Path) -> None:
    plant, model, batch, plan = CASES[kind]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        planted = checker_of(model(8), batch, tmp_path)
        with pytest.raises(CheckError, match="does not give what one device gives"):
            print(planted.try_plan(plan).says)
    says = checker_of(model(10), batch, tmp_path).try_plan(plan).says  # of another width: equal programs are known
    assert says.startswith("checked: "), says
