"""`Options(align=...)` obeys a file of overrides: a model in bf16 with one op up-cast is that by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.check.verdict import judge
from hetu_fx.errors import AlignError, StateError
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx.switching.graph_execution import GraphExecution
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
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("as_file", [True, False])
def test_an_op_that_is_up_cast_gives_what_casts_by_hand_give(as_file: bool, tmp_path: Path) -> None:
    OVERRIDES.write(tmp_path / "align.json")
    loss, gradients = made(
        Net(by_hand=False), options=hetu_fx.Options(align=tmp_path / "align.json" if as_file else OVERRIDES)
    )
    wanted, by_hand = made(Net(by_hand=True))
    assert torch.equal(loss, wanted)
    assert all(torch.equal(*pair) for pair in zip(gradients, by_hand, strict=True))
    plain = made(Net(by_hand=False))[1]
    assert not all(torch.equal(*pair) for pair in zip(plain, by_hand, strict=True))  # the override does something


def test_a_file_that_cannot_be_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    (tmp_path / "align.json").write_text('{"format": "hetu_fx.align/1", "ops": {"aten.sofmax.int": "up-cast"}}')
    model = Net(by_hand=False)
    with pytest.raises(AlignError, match=r"did you mean 'aten.softmax.int'\?"):
        hetu_fx.auto_parallelize(
            model.bfloat16(), batch(), plan=Plan.single(0), options=hetu_fx.Options(align=tmp_path / "align.json")
        )
    assert not hasattr(model, "hetu")


def test_without_a_graph_there_are_no_ops_to_override() -> None:
    with pytest.raises(StateError, match="capture='eager' makes none"):
        hetu_fx.auto_parallelize(
            Net(False), batch(), plan=Plan.single(0), capture="eager", options=hetu_fx.Options(align=OVERRIDES)
        )


class Large(nn.Module):
    """Averages numbers whose sum float32 does not have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 16), nn.Linear(1, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        mean = (self.up(x).sigmoid() * 1e38).mean(-1, keepdim=True)
        return {"loss": nn.functional.mse_loss(self.down(mean / 1e38), y)}


@pytest.mark.parametrize("overrides", [{}, {"aten.mean.dim": "up-cast"}], ids=["as it stands", "up-cast"])
def test_all_ranks_of_a_plan_obey(overrides: dict[str, str]) -> None:
    given = {name: tensor.float() for name, tensor in batch().items()}
    model, how, plan = Large(), Lockstep(), Plan.data_parallel((0, 1, 2), (3, 1, 2))
    captured = GraphExecution(Programs(copy.deepcopy(model), None, OpOverrides(overrides)), given, None)
    made = how.train(model, [given, given], plan, captured)
    assert all(math.isfinite(step.loss) is bool(overrides) for step in made.steps)
    if overrides:
        wide = {name: tensor.double() for name, tensor in given.items()}
        alone = train_alone(copy.deepcopy(model).double(), [wide, wide], how)
        assert judge("plan", alone, made, 1e-5, "").verdict == "equal"
