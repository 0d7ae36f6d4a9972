"""What takes a count of values for the rows becomes a leaf, so that batches may have any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.graph.capture import capture
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

CLASSES = 3


class Margin(nn.Module):
    """Adds a margin to the angle to each row's own class, as ArcFace does: `cos[mask == 1]` has a value of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, CLASSES))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        cos = F.normalize(h, dim=1) @ F.normalize(self.w, dim=0)
        mask = torch.zeros(y.size(0), CLASSES, dtype=h.dtype)
        mask[torch.arange(y.size(0)), y] = 1
        own = cos[mask == 1]
        more = (torch.cos(torch.acos(own.clamp(-0.9, 0.9)) + 0.3) - own).unsqueeze(1)
        return F.cross_entropy(4 * (cos + mask * more), y)


class OfOneSize(Margin):
    """Takes six rows only."""

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return super().forward(h, y) + h.reshape(6, 4).sum() * 0


class Model(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.loss(torch.tanh(self.body(x)), y)
        return made


def batch_of(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    return {"x": torch.randn(rows, 4, dtype=torch.float64), "y": torch.arange(rows) % CLASSES}


def made(loss: nn.Module) -> Model:
    torch.manual_seed(0)
    return Model(loss).double()


PLANS = {
    "rows 3:1": Plan.data_parallel((0, 1), (3, 1)),
    "mixed": Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2,)),)))),
}


def test_a_loss_that_picks_one_value_of_each_row_trains_as_on_one_device() -> None:
    model, batches = made(Margin()), [batch_of(8), batch_of(6)]
    with pytest.warns(LeafWarning, match=r"loss \(Margin\) is a leaf.*test_counted_rows\.py:\d+"):
        captured = Lockstep().capture(model, batches[0])
    assert captured.program.graph.batch_symbol is not None
    alone = train_alone(model, batches, Lockstep())
    for plan in PLANS.values():
        found = Lockstep().train(model, batches, plan, captured)
        for step, own in zip(found.steps, alone.steps, strict=True):
            assert step.loss == pytest.approx(own.loss, rel=1e-10)
            for name, gradient in own.gradients.items():
                torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("model", [Margin(), Model(OfOneSize())])
def test_the_batch_size_is_fixed_where_nothing_can_be_a_leaf_for_others(model: nn.Module) -> None:
    batch = batch_of(6)
    graph = capture(model.double(), batch if isinstance(model, Model) else {"h": batch["x"], "y": batch["y"]})
    assert graph.batch_symbol is None
    assert not graph.leaf_calls
    assert any("the batch size is fixed by the model" in note for note in graph.notes)
