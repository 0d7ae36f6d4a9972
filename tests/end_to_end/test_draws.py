"""What a model draws does not depend on the plan, wherever rows stand: one device's own numbers are every plan's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep
from hetu_fx.plans.plan import Pipeline, Plan, Stage

ROWS = Plan.data_parallel((0, 1), (3, 1))
MIXED = Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),))))
TENSOR = Plan.tensor_parallel((0, 1))
WIDTH, SEQUENCE = 6, 5

Body = Callable[[Tensor], Tensor]
BATCHES = [
    {"x": torch.randn(rows, SEQUENCE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))}
    for rows in (8, 6)
]


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3)


def sorted_rows(x: Tensor, body: Body) -> Tensor:
    """Drop what rows stand in an order of their values for."""
    order = x[:, 0, 0].argsort()
    return (dropped(body(x)[:, 0][order]) * x[:, 1][order]).pow(2).mean()


DRAWS: dict[str, Callable[[Tensor, Body], Tensor]] = {
    "rows": lambda x, body: dropped(body(x)).pow(2).mean(),
    "twice": lambda x, body: dropped(body(x.repeat(2, 1, 1))).pow(2).mean(),
    "each twice": lambda x, body: dropped(body(x.repeat_interleave(2, 0))).pow(2).mean(),
    "joined": lambda x, body: dropped(body(torch.cat([x, x]))).pow(2).mean(),
    "samples": lambda x, body: dropped(body(x)[None].expand(3, -1, -1, -1).reshape(-1, WIDTH)).pow(2).mean(),
    "time first": lambda x, body: dropped(body(x.transpose(0, 1)).flatten(0, 1)).pow(2).mean(),
    "noise": lambda x, body: (h := body(x.repeat(3, 1, 1))).add(torch.randn_like(h)).pow(2).mean(),
    "centered": lambda x, body: dropped((h := body(x)[:, 0]) - h.mean(0)).pow(2).mean(),
    "pairs": lambda x, body: dropped((h := body(x)[:, 0]) @ h.t()).mean(),
    "sorted": sorted_rows,
}


class Net(nn.Module):
    """Two products, and what is drawn of their results."""

    def __init__(self, draws: Callable[[Tensor, Body], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Without a bias at the end: of a centered one there is no gradient but rounding.
        self.up, self.down, self.draws = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False), draws
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.draws(x, lambda x: self.down(torch.tanh(self.up(x))))


@pytest.mark.parametrize("plan", [ROWS, MIXED, TENSOR], ids=["rows 3:1", "mixed", "tensor parallel"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_device(name: str, plan: Plan) -> None:
    model = Net(DRAWS[name])
    alone, ranks = Lockstep(ranks=1, seed=3), 1 + max(plan.devices)
    expected = alone.train(model, BATCHES, Plan.single())
    made = Lockstep(ranks=ranks, rows=(5, 2, 1)[-ranks:] if ranks > 2 else (6, 2), seed=3).train(model, BATCHES, plan)
    told = judge("", expected, made, 1e-10, "")
    assert told.verdict == "equal", told


def test_draws_of_replicas_are_none_of_each_other() -> None:
    model = Net(DRAWS["rows"])
    one, other = (Lockstep(ranks=1, seed=seed).train(model, BATCHES, Plan.single()) for seed in (3, 4))
    assert one.steps[0].loss != other.steps[0].loss
