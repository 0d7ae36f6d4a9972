"""Models whose forward compares the number of rows: one device decides, whatever each replica has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import GivenBatch
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.captures import Programs

PLANS = {
    "rows 3:1": Plan((Pipeline((Stage((0,)),), share=3), Pipeline((Stage((1,)),), share=1))),
    "two stages": Plan((Pipeline((Stage((0,)), Stage((1,)))),)),
}
ROWS = (8, 12, 7, 8)
FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda h: h.contiguous() if h.shape[0] >= 10 else h,
    "from ten on": lambda h: h * 2 if h.shape[0] >= 10 else h * 3,
    "pairs": lambda h: h[0::2] - h[1::2] if h.shape[0] % 2 == 0 else h,
    "more than its width": lambda h: h * 2 if h.shape[0] > h.shape[1] + 2 else h * 3,
}


class Compares(nn.Module):
    """Calls a function of rows between blocks and the loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)),
            nn.Linear(6, 6),
        )
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.function(x)).square().mean()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_rows_of_all_replicas_decide(forward: Callable[[Tensor], Tensor], plan: Plan) -> None:
    torch.manual_seed(0)
    model = Compares(forward).double()
    batches = [{"x": torch.randn(rows, 6).double()} for rows in ROWS]
    how = Lockstep(ranks=3, rows=(3, 2, 100))
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_a_batch_that_all_ranks_have_whole_is_counted_once() -> None:
    torch.manual_seed(0)
    model = Compares(FORWARDS["from ten on"]).double()
    batches = [{"x": torch.randn(rows, 6).double()} for rows in ROWS]
    how = Lockstep(ranks=2)
    made = how.train(model, batches, PLANS["rows 3:1"])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"


@pytest.mark.parametrize(
    "forward",
    [
        lambda h: h - h.mean(0) if len(h) > 1 else h,
        lambda h: h * 3 if h.shape[0] == 1 else h * 2,
        lambda h: h.squeeze().softmax(0),
        lambda h: h * torch.tensor([2.0 if len(h) > 1 else 3.0], dtype=h.dtype),
        lambda h: h.softmax(-1),
    ],
    ids=["more than one", "one", "squeezed", "a constant", "by itself"],
)
@pytest.mark.parametrize("rows", [(8, 1, 7), (1, 8, 1)], ids=["later", "first"])
def test_a_batch_of_one_row_is_what_it_is_to_one_device(
    forward: Callable[[Tensor], Tensor], rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = Compares(forward).double()
    batches = [{"x": torch.randn(number, 6).double()} for number in rows]
    how = Lockstep(ranks=2)
    made = how.train(model, batches, PLANS["rows 3:1"])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"


class ReadsValues(nn.Module):
    """A layer whose Python reads values: a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h * 2 if float(h.sum()) > 1e9 else h)


@pytest.mark.parametrize("brought", [None, (3, 2, 100)], ids=["all bring the same", "each brings some"])
def test_a_leaf_takes_one_row_as_well(brought: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    model = Compares(ReadsValues()).double()
    batches = [{"x": torch.randn(number, 6).double()} for number in (8, 1, 7)]
    how = Lockstep(ranks=3, rows=brought)
    made = how.train(model, batches, PLANS["rows 3:1"])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"


def test_a_leaf_in_a_graph_of_one_row_alone_is_that_of_its_trace() -> None:
    class Squeezes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = ReadsValues()

        def forward(self, h: Tensor) -> Tensor:
            return self.part(h).squeeze().softmax(0)

    torch.manual_seed(0)
    model = Compares(Squeezes()).double()
    batches = [{"x": torch.randn(number, 6).double()} for number in (8, 1, 7)]
    made = Lockstep(ranks=2).train(model, batches, PLANS["rows 3:1"])
    assert judge("", train_alone(model, batches, Lockstep(ranks=2)), made, 1e-10, "").verdict == "equal"


def test_a_batch_norm_of_one_row_is_refused_as_by_torch() -> None:
    model = Compares(nn.BatchNorm1d(6)).double()
    batches = [{"x": torch.randn(number, 6).double()} for number in (8, 1)]
    with pytest.raises(BatchError, match="Expected more than 1 value per channel"):
        Lockstep().train(model, batches, Plan.single(0))


def test_a_graph_of_more_rows_that_holds_for_one_takes_any_rows() -> None:
    programs = Programs(Compares(lambda h: h.softmax(-1)), None)
    found = [programs.match(GivenBatch.of({"x": torch.randn(rows, 6)}), True, rows).program for rows in (8, 1, 8, 1)]
    assert [program.graph.takes_any_rows for program in found] == [True] * 4
    assert found[1] is found[3]
