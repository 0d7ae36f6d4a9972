"""Products beside the communication before and after them: trainings are those of one device, slices or none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

WIDTH = 12
SLOW = Cluster.on_paper([1e6] * 5, nodes=tuple("abcde"), intra=Link(1e5), inter=Link(1e5))
"""On whose links a sum takes about as long as the product before it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 60), nn.Linear(WIDTH, 60)
        self.down = nn.Linear(60, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        return x + self.down(F.silu(self.gate(rows)) * self.up(rows))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, tokens, WIDTH, dtype=torch.float64)}


GROUP = Plan.tensor_parallel((0, 1, 2), (3, 1, 2))
UNEQUAL = Plan((Pipeline((Stage((0, 1, 2), (2, 1, 1)),), share=2), Pipeline((Stage((3, 4), (2, 1)),))))
STAGES = Plan((Pipeline((Stage((0, 1), (2, 1), blocks=1), Stage((2, 3), blocks=1)), micro_batches=2),))
AGAIN = Plan((Pipeline((Stage((0, 1), (2, 1), recompute=1),)),))
PLANS = {
    "a group": GROUP,
    "one that shares the sequence": replace(GROUP, sequence_parallel=True),
    "unequal replicas": UNEQUAL,
    "unequal replicas that share the sequence": replace(UNEQUAL, sequence_parallel=True),
    "stages": STAGES,
    "gradients of weights wait": replace(STAGES, schedule="zero-bubble"),
    "a block is recomputed": AGAIN,
    "but for its products": Plan((Pipeline((Stage((0, 1), (2, 1), recompute=1, recompute_ops="attention"),)),)),
    "and the sequence is shared": replace(AGAIN, sequence_parallel=True),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is started to be waited for later, and how often."""
    counted: Counter[str] = Counter()
    for name in ("sum", "scatter", "gather"):
        act = getattr(Collectives, name)

        def counting(self: Collectives, *args: object, name: str = name, act: Any = act) -> object:
            if self.is_async and self.number is None:
                counted[name] += 1
            return act(self, *args)

        monkeypatch.setattr(Collectives, name, counting)
    return counted


@pytest.mark.parametrize("cluster", [None, SLOW], ids=["no prices", "slow links"])
@pytest.mark.parametrize("name", PLANS)
def test_a_training_is_that_of_one_device(name: str, cluster: Cluster | None, calls: Counter[str]) -> None:
    torch.manual_seed(3)
    model, given = Blocks().double(), [batch(6, 32), batch(5, 17), batch(3, 2)]
    how = Lockstep(partial(torch.optim.AdamW, lr=1e-2), cluster=cluster)
    verdict = judge("plan", train_alone(model, given, how), how.train(model, given, PLANS[name]), 1e-10, "")
    assert verdict.verdict == "equal", verdict
    assert set(calls) == _started(PLANS[name], sliced=cluster is not None)


def _started(plan: Plan, *, sliced: bool) -> set[str]:
    """Tell what travels beside products: without slices, only what the backward sums of rows."""
    if plan.schedule == "zero-bubble":
        return set()
    if not plan.sequence_parallel:
        return {"sum"}
    return {"scatter", "gather"} if sliced else {"scatter"}


def test_rows_are_cast_for_their_products_and_gradients_summed_as_they_were(calls: Counter[str]) -> None:
    torch.manual_seed(3)
    model, given = Blocks(), [{"x": batch(6, 32)["x"].float()}]
    low = Plan((Pipeline((Stage((0, 1), (2, 1), dtype="bfloat16"),)),))
    how = Lockstep(cluster=None)
    (alone,), (made,) = train_alone(model, given, how).steps, how.train(model, given, low).steps
    assert calls["sum"] == 2
    assert made.loss == pytest.approx(alone.loss, rel=1e-2)
    for name, gradient in alone.gradients.items():
        assert made.gradients[name].dtype == torch.float32
        torch.testing.assert_close(made.gradients[name], gradient, rtol=0.1, atol=0.02 * float(gradient.abs().max()))
