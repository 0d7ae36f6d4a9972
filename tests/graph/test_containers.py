"""Batches and outputs are taken apart and put together again."""

from __future__ import annotations

import copy
import enum
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph.bind import GivenBatch, input_tensors
from hetu_fx.graph.capture import capture
from hetu_fx.graph.containers import (
    Constant,
    Opaque,
    TensorSlot,
    flatten,
    loss_alone,
    loss_among,
    unflatten,
    walk,
    without_opaque,
)

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    loss: torch.Tensor | None
    name: str = "n"


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        {"a": torch.ones(2), "b": None},
        OrderedDict(a=[1, torch.zeros(1)]),
        (torch.ones(1), [torch.zeros(2), "text"]),
        Point(torch.ones(1), 2),
        Record(torch.ones(1)),
        {"deep": {"deeper": (Record(None), 1.5)}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_unflatten_undoes_flatten(value: object) -> None:
    tree, tensors = flatten(value)
    again = unflatten(tree, tensors)
    assert type(again) is type(value)
    assert str(again) == str(value)


def test_names_are_paths() -> None:
    _, tensors = flatten({"a": [torch.ones(1), {"b": torch.ones(1)}], "c": Record(torch.ones(1))})
    assert list(tensors) == ["a.0", "a.1.b", "c.loss"]


def test_slots_without_a_value_become_none() -> None:
    tree, _ = flatten(Record(torch.ones(1)))
    assert unflatten(tree, {}) == Record(None)


class _Cache:
    def get_seq_length(self) -> int:
        return 0


def test_unknown_objects_are_opaque_and_can_be_dropped() -> None:
    tree, _ = flatten({"cache": _Cache(), "x": torch.ones(1), "n": 3})
    kinds = [type(leaf) for leaf in walk(tree)]
    assert kinds == [Opaque, TensorSlot, Constant]
    made = unflatten(without_opaque(tree), {})["cache"]
    assert made is not None
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    for use in (lambda: made.get_seq_length(), lambda: made[0], lambda: len(made), lambda: list(made)):
        with pytest.raises(StateError, match=r"(?s)output 'cache' is a _Cache .*hint: .* model.hetu.whole\(\)"):
            use()
    assert unflatten(loss_alone(without_opaque(tree), ""), {})["cache"] is None
    assert not hasattr(made, "dtype")  # nor has what it stands for


def test_a_tensor_that_is_not_brought_back_says_so_whatever_is_done_with_it() -> None:
    tree, _ = flatten({"loss": torch.ones(()), "logits": torch.ones(2), "n": 3})
    made = unflatten(loss_alone(tree, "loss"), {"loss": torch.ones(())})
    logits = made["logits"]
    assert isinstance(made["loss"], torch.Tensor)
    assert made["n"] == 3
    uses = (
        lambda: logits.argmax(-1),
        lambda: torch.argmax(logits, -1),
        lambda: torch.cat([torch.ones(1), logits]),
        lambda: logits[0],
        lambda: logits + 1,
        lambda: torch.ones(2) * logits,
        lambda: logits == torch.ones(2),
        lambda: torch.ones(2) == logits,
        lambda: float(logits),
        lambda: list(logits),
        lambda: logits.shape,
    )
    for use in uses:
        with pytest.raises(StateError, match=r"output 'logits' was not brought back[\s\S]*outputs=\"all\""):
            use()
    assert not hasattr(logits, "dtype")  # libraries ask whatever they are given
    assert copy.deepcopy(logits) == logits == pickle.loads(pickle.dumps(logits))


OUTPUTS = ["logits", "accuracy", "total", "extra"]


@pytest.mark.parametrize(
    ("names", "scalars", "trained", "loss"),
    [
        (["0", "1"], ["1"], ["0", "1"], "1"),  # logits, loss
        (["0", "1"], ["0"], ["0", "1"], "0"),  # loss, logits
        (["0", "1"], ["0", "1"], ["1"], "1"),  # accuracy, loss
        (["0", "1"], ["0", "1"], ["0", "1"], "0"),  # several losses: the first
        (["0", "1", "2"], ["1", "2"], ["0", "1", "2"], None),  # logits, and two of which nobody knows which
        (["0", "1"], ["0"], [], "0"),  # nothing is trained
        (["logits", "loss"], ["loss"], [], "loss"),
        (["loss", "total"], ["total"], ["total", "loss"], None),  # what is named so is no number
        (OUTPUTS, ["accuracy", "total"], ["logits", "total"], "total"),
        (OUTPUTS, ["total", "extra"], ["total", "extra"], None),
        ([""], [""], [""], ""),
        ([], [], [], None),
    ],
)
def test_the_only_number_that_needs_a_gradient_is_the_loss_wherever_it_stands(
    names: list[str], scalars: list[str], trained: list[str], loss: str | None
) -> None:
    assert loss_among(names, scalars, trained) == loss


class Kind(enum.Enum):
    ONE = 1


def test_members_of_an_enumeration_are_plain_values() -> None:
    tree, _ = flatten({"kind": Kind.ONE})
    assert list(walk(tree)) == [Constant("kind", Kind.ONE)]


def test_a_batch_with_objects_is_refused() -> None:
    GivenBatch.of({"x": torch.ones(1), "n": [3, None]}).check_no_objects()
    with pytest.raises(BatchError, match=r"'cache' \(object\)\nhint: .*whole"):
        GivenBatch.of({"x": torch.ones(1), "cache": object()}).check_no_objects()


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


def test_a_changed_baked_in_value_is_refused() -> None:
    graph = capture(Scaled(), {"x": torch.ones(4, 3), "scale": 2.0})
    assert list(input_tensors(graph, {"x": torch.ones(4, 3), "scale": 2.0})) == ["x"]
    with pytest.raises(BatchError, match=r"'scale' is 3.0, but 2.0 is baked"):
        input_tensors(graph, {"x": torch.ones(4, 3), "scale": 3.0})


def test_a_batch_with_other_keys_is_refused() -> None:
    graph = capture(Scaled(), {"x": torch.ones(4, 3), "scale": 2.0})
    with pytest.raises(BatchError, match=r"\['x', 'y'\].*takes \['x'\]"):
        input_tensors(graph, {"x": torch.ones(4, 3), "y": torch.ones(1), "scale": 2.0})
