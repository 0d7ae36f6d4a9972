"""Python values in what a forward returns: right, or named when they are used."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import StateError
from hetu_fx.graph.capture import capture
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.ranks.outputs import Ranks

PLANS = {
    "rows": Plan.data_parallel((0, 1), (3, 1)),
    "group": Plan((Pipeline((Stage((0, 1)),)),)),
    "micro-batches": Plan((Pipeline((Stage((0,)),), 3, 2), Pipeline((Stage((1,)),), 1))),
}


class Logs(nn.Module):
    """Returns what scripts log beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        start = time.perf_counter()
        loss = nn.functional.mse_loss(self.head(x), y)
        right = (self.head(x).argmax(1) == y.argmax(1)).sum()
        return {
            "loss": loss,
            "mse": loss.item(),
            "percent": 100 * loss.item() / 2 - 1,
            "cube": loss.item() ** 3,
            "right": right.item(),
            "rows": x.shape[0],
            "layers": 1,
            "seconds": time.perf_counter() - start,
            "second": int(time.time()),
        }


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(8, 5, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_number_read_from_a_tensor_is_that_of_the_whole_batch_on_every_rank(plan: str) -> None:
    model, whole = Logs().double(), batch()
    plain = model(**whole)
    own = [{name: tensor[:3] for name, tensor in whole.items()}, {name: tensor[3:] for name, tensor in whole.items()}]
    for made in Ranks(PLANS[plan]).call(model, own):
        assert type(made["mse"]) is float
        assert made["mse"] == pytest.approx(plain["mse"], abs=1e-12)
        assert made["percent"] == pytest.approx(plain["percent"], abs=1e-10)
        assert made["cube"] == pytest.approx(plain["cube"], abs=1e-10)
        assert (type(made["right"]), made["right"]) == (int, plain["right"])
        assert made["layers"] == 1


def test_what_is_another_number_in_every_call_says_so_when_it_is_used() -> None:
    (made,) = Ranks(Plan.single()).call(Logs().double(), [batch()])
    for name in ("seconds", "second"):
        with pytest.raises(StateError, match=f"output '{name}' .* another one in every call"):
            f"{made[name]:.3f}"


def test_a_number_of_the_batchs_sizes_is_named_when_it_is_used() -> None:
    (made,) = Ranks(Plan.single()).call(Logs().double(), [batch()])
    with pytest.raises(StateError, match=r"output 'rows' .* follows from the sizes"):
        made["rows"] + 1


def test_a_number_that_was_not_asked_for_says_how_to_ask() -> None:
    (made,) = Ranks(Plan.single(), outputs="loss").call(Logs().double(), [batch()])
    assert made["loss"].item() > 0
    with pytest.raises(StateError, match=r'(?s)output \'mse\' .*outputs="all"'):
        round(made["mse"], 3)
    assert made["layers"] == 1


def test_a_number_that_no_tensor_can_give_is_named_when_it_is_used() -> None:
    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> dict[str, Any]:
            loss = self.head(x).pow(2).mean()
            return {"loss": loss, "both": loss.item() + self.head.weight.sum().item()}

    graph = capture(Powers(), {"x": torch.randn(4, 6)})
    assert [leaf.name for leaf in graph.outputs] == ["loss"]
    with pytest.raises(StateError, match=r"output 'both' .* not made of one tensor"):
        float(graph.rebuild({"loss": torch.ones(())})["both"])
