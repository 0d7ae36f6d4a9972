"""A deep copy of a parallel model becomes parallel at its first call; a pickle holds the plain model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.api import RestoreOriginal, as_it_was, attach_copying


class Twice(nn.Module):
    """A model whose forward is replaced when it is made parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * 2


class Recipe:
    """Makes a copy parallel as the model was; remembers for which batches it was asked to."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.calls.append((args, dict(kwargs)))
        attach(model, self)


def attach(model: nn.Module, recipe: Recipe) -> None:
    plain = RestoreOriginal(model)
    forward = MethodType(lambda self, x: Twice.forward(self, x) * 10, model)
    object.__setattr__(model, "forward", forward)
    object.__setattr__(model, "handle", object())
    attach_copying(model, plain, lambda: recipe)


def parallel() -> tuple[Twice, Recipe]:
    model, recipe = Twice(), Recipe()
    attach(model, recipe)
    return model, recipe


def test_a_copy_is_made_parallel_when_it_is_first_called() -> None:
    model, recipe = parallel()
    other = copy.deepcopy(model)
    assert not hasattr(other, "handle")
    assert not recipe.calls
    x = torch.ones(2)
    assert [other(x).tolist() for _ in range(2)] == [[20, 20], [20, 20]]
    assert len(recipe.calls) == 1
    assert recipe.calls[0][0][0] is x
    assert hasattr(other, "handle")


def test_a_copy_has_parameters_of_its_own_and_leaves_the_model_as_it_was() -> None:
    model, _ = parallel()
    handle = model.handle
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.zero_()
    assert model.handle is handle
    assert model(torch.ones(2)).tolist() == [20, 20]
    assert type(other) is Twice


def test_a_copy_is_copied_before_and_after_its_first_call() -> None:
    model, recipe = parallel()
    first = copy.deepcopy(copy.deepcopy(model))
    assert first(torch.ones(2)).tolist() == [20, 20]
    second = copy.deepcopy(first)
    assert second(torch.ones(2)).tolist() == [20, 20]
    assert len(recipe.calls) == 2


def test_a_copy_inside_a_larger_module_is_made_parallel_too() -> None:
    model, recipe = parallel()
    outer = copy.deepcopy(nn.Sequential(model))
    assert outer(torch.ones(2)).tolist() == [20, 20]
    assert len(recipe.calls) == 1


def test_a_pickle_holds_the_plain_model() -> None:
    model, _ = parallel()
    for one in (model, copy.deepcopy(model)):
        found = pickle.loads(pickle.dumps(one))
        assert found(torch.ones(2)).tolist() == [2, 2]
        assert not hasattr(found, "handle")
    assert model(torch.ones(2)).tolist() == [20, 20]


def test_what_a_model_had_before_comes_back() -> None:
    model = Twice()
    mine = MethodType(lambda self, x: x, model)
    object.__setattr__(model, "forward", mine)
    plain = RestoreOriginal(model)
    object.__setattr__(model, "forward", None)
    object.__setattr__(model, "handle", 1)
    plain.is_attached(model)
    with plain.of(model):
        assert model.forward is mine
        assert not hasattr(model, "handle")
    assert model.forward is None
    plain.detach_from(model)
    assert model.forward is mine


def test_a_copy_that_is_made_parallel_otherwise_is_the_plain_model() -> None:
    model, recipe = parallel()
    other = copy.deepcopy(model)
    as_it_was(other)
    assert other(torch.ones(2)).tolist() == [2, 2]
    assert not recipe.calls
    as_it_was(model)  # no copy: it stays parallel
    assert model(torch.ones(2)).tolist() == [20, 20]
