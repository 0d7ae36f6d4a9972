"""A replica that has no rows of a batch has the buffers that the others have updated all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

HOW = Lockstep()
FIRST, LAST = (Plan.data_parallel((0, 1, 2), shares) for shares in ((1, 9, 9), (9, 9, 1)))
STAGES = Plan((Pipeline((Stage((0,)), Stage((1,))), share=9), Pipeline((Stage((2,)), Stage((3,))))))


class Counted(nn.Module):
    """Is divided by how many steps there have been, in its blocks and after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.out(x) / self.steps


@pytest.mark.parametrize("plan", [FIRST, LAST, STAGES], ids=["the first", "the last", "stages"])
def test_a_replica_without_rows_takes_over_what_others_have_updated(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Counted().double()
    batches = [{"x": torch.randn(rows, 4, dtype=torch.float64)} for rows in (2, 40, 2)]
    verdict = judge("", train_alone(model, batches, HOW), HOW.train(model, batches, plan), 1e-10, "")
    assert verdict.verdict == "equal", verdict
