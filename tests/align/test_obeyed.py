"""`auto_parallelize(align=...)` obeys a file of overrides: a model in bf16 with one op up-cast is that by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import AlignError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides

OVERRIDES = OpOverrides({"aten.softmax.int": "up-cast"})


class Net(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.by_hand = nn.Linear(6, 32), nn.Linear(32, 2), by_hand

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.up(x)
        scores = torch.softmax(hidden.float(), -1).to(hidden.dtype) if self.by_hand else torch.softmax(hidden, -1)
        return {"loss": nn.functional.mse_loss(self.down(scores), y)}


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": 9 * torch.randn(8, 6).bfloat16(), "y": torch.randn(8, 2).bfloat16()}


def made(model: nn.Module, **more: object) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of a parallel model on one device."""
    model = hetu_fx.auto_parallelize(model.bfloat16(), batch(), plan=Plan.single(0), **more)
    loss = model(**batch())["loss"]
    loss.backward()
    return loss.detach(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("as_file", [True, False])
def test_an_op_that_is_up_cast_gives_what_casts_by_hand_give(as_file: bool, tmp_path: Path) -> None:
    OVERRIDES.write(tmp_path / "align.json")
    loss, gradients = made(Net(by_hand=False), align=tmp_path / "align.json" if as_file else OVERRIDES)
    wanted, by_hand = made(Net(by_hand=True))
    assert torch.equal(loss, wanted)
    assert all(torch.equal(*pair) for pair in zip(gradients, by_hand, strict=True))
    plain = made(Net(by_hand=False))[1]
    assert not all(torch.equal(*pair) for pair in zip(plain, by_hand, strict=True))  # the override does something


def test_a_file_that_cannot_be_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    (tmp_path / "align.json").write_text('{"format": "hetu_fx.align/1", "ops": {"aten.sofmax.int": "up-cast"}}')
    model = Net(by_hand=False)
    with pytest.raises(AlignError, match=r"did you mean 'aten.softmax.int'\?"):
        hetu_fx.auto_parallelize(model.bfloat16(), batch(), plan=Plan.single(0), align=tmp_path / "align.json")
    assert not hasattr(model, "hetu")


def test_without_a_graph_there_are_no_ops_to_override() -> None:
    with pytest.raises(StateError, match="capture='eager' makes none"):
        hetu_fx.auto_parallelize(Net(False), batch(), plan=Plan.single(0), capture="eager", align=OVERRIDES)
