"""A batch is a mapping or a tuple; a forward and what makes the loss of its output each take theirs of it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import LossCall, as_call, output_and_loss


def test_a_list_is_a_batch_as_a_tuple_is() -> None:
    assert as_call([1, 2]) == as_call((1, 2)) == ((1, 2), {})  # type: ignore[arg-type]  # loaders give lists


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.ones(2), r"a tensor, whose rows would be taken[\s\S]*hint: give a tuple of arguments"),
        (DataLoader(TensorDataset(torch.ones(2))), r"a DataLoader\nhint: give one batch of it, next"),
        (TensorDataset(torch.ones(2)), r"a Dataset\nhint"),
        (3, "this is a int"),
    ],
    ids=["tensor", "loader", "dataset", "number"],
)
def test_what_is_no_batch_is_refused_with_what_to_give(given: Any, says: str) -> None:
    with pytest.raises(BatchError, match=says):
        as_call(given)


def forward(x: Any, mask: Any = None, **more: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("loss_fn", "names"),
    [
        (lambda out, labels: out, "x mask labels more"),
        (lambda out, x, labels=None: out, "x mask labels more"),
        (lambda out, **batch: out, "x mask more"),
        (lambda out, *batch: out, "x mask more"),
        (nn.CrossEntropyLoss(), "x mask target more"),
        (None, "x mask more"),
    ],
)
def test_what_the_loss_alone_takes_comes_after_what_forward_takes(loss_fn: Any, names: str) -> None:
    assert " ".join(LossCall(forward, loss_fn).signature.parameters) == names


def test_each_takes_what_it_names() -> None:
    call = LossCall(lambda x: x, lambda out, labels: out)
    given = {"x": 1, "labels": 2}
    assert call.of_model(given) == {"x": 1}
    assert call.of_loss(given) == {"labels": 2}
    assert not call.missing(given)
    assert "labels" in call.missing({"x": 1})
    assert LossCall(lambda x: x, lambda out, **batch: out).of_loss(given) == given


def test_a_model_and_its_criterion_are_called_as_in_a_loop() -> None:
    model, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
    for loss_fn in (nn.CrossEntropyLoss(), lambda out, target: F.cross_entropy(out, target)):
        output, loss = output_and_loss(model, loss_fn, {"input": x, "target": y})
        assert torch.equal(output, model(x))
        assert torch.equal(loss, F.cross_entropy(model(x), y))
