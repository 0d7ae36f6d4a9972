"""Steps of a log are those of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.report.updates import Updates


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def updates(weight: nn.Parameter) -> Iterator[Updates]:
    made = Updates([weight], 5)
    yield made
    made.close()


def batch(loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    told = {"event": "step", "step": 99, "variant": "a", "longest": 4, "rows": [2, 1], "seconds": 0.5, "loss": loss}
    return {**told, "predicted_seconds": 0.25, "compute_seconds": [0.1], "host_seconds": [], **more}


def backward(weight: nn.Parameter) -> None:
    weight.sum().backward()  # type: ignore[no-untyped-call]


def test_batches_whose_gradients_are_added_up_are_one_step(weight: nn.Parameter, updates: Updates) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.1)
    backward(weight)
    assert list(updates.joined([batch(1.0)])) == []
    backward(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    (told,) = updates.joined([batch(2.0, longest=7)])
    assert (told["step"], told["micro_steps"], told["loss"], told["seconds"]) == (6, 2, 1.5, 1.0)
    assert (told["rows"], told["longest"], told["predicted_seconds"]) == ([4, 2], 7, 0.5)
    assert (told["compute_seconds"], told["host_seconds"]) == ([0.2], [])
    backward(weight)
    optimizer.step()
    (alone,) = updates.joined([batch()])
    assert (alone["step"], "micro_steps" in alone) == (7, False)


def test_a_loop_without_an_optimizer_of_torch_has_a_step_for_each_time_that_gradients_are_gone(
    weight: nn.Parameter, updates: Updates
) -> None:
    backward(weight)
    assert list(updates.joined([batch()])) == []
    weight.grad = None
    assert [entry["micro_steps"] for entry in updates.joined([batch()])] == [2]
    assert [entry["step"] for entry in updates.joined([batch(), batch()])] == [7, 8]


def test_another_models_optimizer_ends_no_step(weight: nn.Parameter, updates: Updates) -> None:
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    backward(weight)
    torch.optim.SGD([other], lr=0.1).step()
    assert list(updates.joined([batch()])) == []
    (held,) = updates.rest()
    assert held["step"] == 6
    assert list(updates.rest()) == []


def test_a_step_that_goes_on_in_another_variant_is_told_in_parts_of_one_number(
    weight: nn.Parameter, updates: Updates
) -> None:
    backward(weight)
    switch = {"event": "switch", "step": 99, "from": "a", "to": "b"}
    evaluation = {"event": "evaluation", "step": 99}
    assert [e["event"] for e in updates.joined([batch(), evaluation])] == ["evaluation"]
    weight.grad = None
    told = list(updates.joined([switch, batch(None, variant="b")]))
    assert [(e["event"], e["step"]) for e in told] == [("step", 6), ("switch", 6), ("step", 6)]
    assert told[-1]["loss"] is None
