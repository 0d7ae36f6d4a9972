"""Convolutions in groups, whose channels only the run may tell to be so many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan


class EveryOtherChannel(nn.Module):
    """Convolves, in two groups, every other channel of as many as the batch has; rows are the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.movedim(2, 0)[:, ::2]).flatten(1)).square().mean()


@pytest.mark.parametrize("plan", [Plan.data_parallel((0, 1), (2, 1)), Plan.tensor_parallel((0, 1))])
def test_groups_of_channels_that_only_the_run_counts_are_whole(plan: Plan) -> None:
    torch.manual_seed(0)
    model, batches = EveryOtherChannel().double(), [{"x": torch.randn(3, 3, 9).double()}]
    how = Lockstep(row_dims={"x": 2})
    verdict = judge("", train_alone(model, batches, how), how.train(model, batches, plan), 1e-12, "")
    assert verdict.verdict == "equal", verdict
