"""Models that fix their batch, on ranks that bring rows of their own, each of which has captured its own example."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import BatchError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.switching.in_threads import runtime_of

Shares = Sequence[tuple[int, ...]]
"""How many rows each rank brings, by step."""

PLANS: dict[str, tuple[Plan, Shares]] = {
    "rows 3:1": (Plan.data_parallel((0, 1), (3, 1)), [(4, 2), (3, 8), (4, 2), (5, 0), (1, 1)]),
    "tensor parallel": (Plan.tensor_parallel((0, 1)), [(4, 2), (3, 8)]),
    "[0,1] beside [2]": (Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))), [(2, 2, 4), (1, 6, 4)]),
    "two stages": (Plan((Pipeline((Stage((0,)), Stage((1,)))),)), [(4, 2), (3, 8)]),
}
FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda h: h * int(h.shape[0]),
    "as large as another size": lambda h: h * int(h.shape[0]) + h.shape[1] * torch.ones(8, 6, dtype=h.dtype)[:1],
    "tensors of its size": lambda h: h + torch.arange(float(int(h.shape[0])), dtype=h.dtype)[:, None],
    "a loop": lambda h: torch.stack([h[i] * (i + 1) for i in range(h.shape[0])]),
    "a view": lambda h: h.view(int(h.shape[0]) * 3, 2).softmax(-1).view(int(h.shape[0]), 6),
    "a comparison": lambda h: h * 2 if int(h.shape[0]) % 3 else h * 3,
    "the least of two": lambda h: h[: min(int(h.shape[0]), 9)],
    "numpy": lambda h: h * torch.as_tensor(np.arange(int(h.shape[0]), dtype=np.float64))[:, None],
    "a comparison of a symbol": lambda h: h * 2 if h.shape[0] >= 10 else h * 3,
    "more than one": lambda h: h - h.mean(0) if len(h) > 1 else h,
}


class Fixed(nn.Module):
    """Calls a function of rows between layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x).tanh())).square().mean()


def losses_of(step: Callable[[Tensor], Tensor], model: nn.Module, batches: Sequence[Tensor]) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def trained_apart(model: nn.Module, plan: Plan, shares: Shares, batches: Sequence[Tensor]) -> list[list[float]]:
    """Return the losses that each rank gets."""

    def run(table: GroupTable) -> list[float]:
        cuts = [batch.split(share)[table.rank].clone() for batch, share in zip(batches, shares, strict=True)]
        own = copy.deepcopy(model)
        runtime = runtime_of(table, own, {"x": cuts[0]}, plan=plan, shared=False)
        return losses_of(lambda rows: runtime.run((), {"x": rows}), own, cuts)

    return run_in_threads(len(shares[0]), run)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_ranks_train_on_the_rows_of_all_as_on_one_device(forward: str, plan: str) -> None:
    torch.manual_seed(0)
    model, (parallel, shares) = Fixed(FORWARDS[forward]).double(), PLANS[plan]
    batches = [torch.randn(sum(share), 6, dtype=torch.float64) for share in shares]
    made = trained_apart(model, parallel, shares, batches)
    alone = losses_of(model, model, batches)
    for losses in made:
        assert losses == pytest.approx(alone, rel=1e-12)


def test_outputs_whose_rows_nobody_knows_are_refused() -> None:
    class Scores(Fixed):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.function(self.first(x)))

    def run(table: GroupTable) -> None:
        rows = torch.randn(2 + table.rank, 6)
        runtime = runtime_of(table, Scores(FORWARDS["a number"]), {"x": rows}, shared=False)
        with pytest.raises(BatchError, match=r"not known which rows of its outputs \['output'\] are this rank's"):
            runtime.run((), {"x": rows})

    run_in_threads(2, run)
