"""The user names a module or a class; copies and subclasses are leaves as well, and what is inside of one is none."""

from __future__ import annotations

import copy
from functools import partial

import pytest
from torch import nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph.leaves.mark import is_marked_leaf, leaf, leaf_modules, named_modules_of


class Marked(nn.Module):
    """Is named by its class."""


leaf(Marked)


class Below(Marked):
    """Is one by the class that it is made from."""


def test_what_is_named_is_returned_and_so_are_copies() -> None:
    module = nn.Linear(2, 2)
    assert leaf(module) is module
    assert is_marked_leaf(copy.deepcopy(module))
    assert not is_marked_leaf(nn.Linear(2, 2))
    assert not any("leaf" in name for name in module.state_dict())


def test_a_class_names_its_modules_and_those_of_its_subclasses() -> None:
    assert is_marked_leaf(Marked())
    assert is_marked_leaf(Below())


def test_only_the_outermost_is_told() -> None:
    model = nn.Sequential(Marked(), nn.Sequential(nn.ReLU(), Below()))
    leaf(model[1])
    assert [name for name, _ in leaf_modules(model, None)] == ["0", "1"]


def test_those_of_a_loss_function_are_told_too() -> None:
    loss, model = Marked(), nn.Linear(2, 2)

    def around(output: object) -> object:
        return loss(output)

    for function in (loss, loss.forward, partial(loss), around):
        assert list(named_modules_of(function)) == [loss]
        assert list(leaf_modules(model, function)) == [("loss_fn.Marked", loss)]


@pytest.mark.parametrize("given", [print, int, "loss"])
def test_nothing_else_can_be_named(given: object) -> None:
    with pytest.raises(CaptureError, match="for a module or a class of modules"):
        leaf(given)  # type: ignore[type-var]
