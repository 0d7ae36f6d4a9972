"""A batch whose loss is no number, of one rank's rows: all ranks see that alike, and do what one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.switching.graph_execution import GraphExecution
from tests.end_to_end.cells import LOSS_FNS, PLANS, Mlp, mlp_batch

STEPS, BAD, ROWS = 4, 1, 9


class Skips(torch.optim.AdamW):
    """Clips gradients, and leaves out steps in which their norm is no number, as careful scripts do."""

    def step(self, closure: Any = None) -> Any:
        norm = nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step(closure) if norm.isfinite() else None


class Scales(torch.optim.AdamW):
    """Clips gradients, and leaves steps to a scaler."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.scaler, self.is_asked = torch.amp.GradScaler("cpu", init_scale=1.0), False
        self.scaler.scale(torch.ones(()))

    def step(self, closure: Any = None) -> Any:
        if self.is_asked:
            return super().step(closure)
        self.scaler.unscale_(self)
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        self.is_asked = True
        self.scaler.step(self)
        self.is_asked = False
        self.scaler.update()
        return None


def model() -> nn.Module:
    torch.manual_seed(3)
    return Mlp().double()


@cache
def captured() -> GraphExecution:
    return Lockstep(loss_fn=LOSS_FNS["mlp"]).capture(model(), mlp_batch(ROWS, 0))


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    made = [mlp_batch(ROWS, 0) for _ in range(STEPS)]
    made[BAD]["target"][-1, 0] = torch.nan  # a row of the last rank that has any
    return made


@pytest.mark.parametrize("plan", ["DP 3:1", "TP2", "PP2 + PP1", "TP2>TP1 + 1"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Skips, Scales])
def test_a_loss_that_is_no_number_is_that_of_one_device(plan: str, optimizer: Callable[..., Any]) -> None:
    ranks = max(PLANS[plan].devices) + 1
    rows = [ROWS - 2 * (ranks - 1), *[2] * (ranks - 1)]
    how = Lockstep(lambda parameters: optimizer(parameters, lr=1e-2), rows=rows, loss_fn=LOSS_FNS["mlp"])
    made, alone = how.train(model(), batches(), PLANS[plan], captured()), train_alone(model(), batches(), how)
    skips = optimizer is not torch.optim.AdamW
    assert [step.loss == step.loss for step in made.steps] == [n < BAD or (skips and n > BAD) for n in range(STEPS)]
    for x, y in zip(made.steps, alone.steps, strict=True):
        assert x.loss == pytest.approx(y.loss, rel=1e-10, nan_ok=True)
    assert {name: bool(tensor.isfinite().all()) for name, tensor in made.state.items()} == dict.fromkeys(
        alone.state, skips
    )
    for name, tensor in alone.state.items():
        torch.testing.assert_close(made.state[name], tensor, rtol=1e-9, atol=1e-10, equal_nan=True)
