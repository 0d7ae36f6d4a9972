"""A forward that a script assigns after the call is what the model runs from then on; a wrapper runs around ours."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import StateError

BATCH = {"x": torch.linspace(-1, 1, 24).reshape(4, 6)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


def doubled(model: Any, x: Tensor) -> dict[str, Tensor]:
    return {"loss": 2 * model.layer(x).square().mean()}


def parallel() -> Any:
    return hetu_fx.auto_parallelize(Net(), BATCH, plan=hetu_fx.Plan.single(0))


def ratio(model: Any) -> float:
    return float(model(**BATCH)["loss"] / Net()(**BATCH)["loss"])


def test_an_assigned_forward_is_captured_and_taken_away_again() -> None:
    model = parallel()
    assert ratio(model) == pytest.approx(1)
    model.forward = MethodType(doubled, model)
    assert ratio(model) == pytest.approx(2)
    assert "'forward' of the model: None -> doubled" in model.hetu.stats["captures"][-1].why[0]
    del model.forward
    assert ratio(model) == pytest.approx(1)
    assert model.hetu.stats["steps"] == 3


def test_the_forward_that_was_there_can_be_put_back_without_another_capture() -> None:
    model = parallel()
    before = model.forward
    model.forward = functools.partial(doubled, model)
    assert ratio(model) == pytest.approx(2)
    captures = len(model.hetu.stats["captures"])
    model.forward = before
    assert ratio(model) == pytest.approx(1)
    assert len(model.hetu.stats["captures"]) == captures


def halved_before(model: Any, x: Tensor) -> dict[str, Tensor]:
    return {"loss": model._before(x=x)["loss"] / 2}


class Halves:
    def __init__(self, before: Any) -> None:
        self.before = [before]

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.before[0](x=x)["loss"] / 2}


def _closure(model: Any) -> Any:
    before = model.forward
    return lambda x: {"loss": before(x=x)["loss"] / 2}


def _attribute(model: Any) -> Any:
    object.__setattr__(model, "_before", model.forward)
    return MethodType(halved_before, model)


@pytest.mark.parametrize("wrap", [_closure, _attribute, lambda model: Halves(model.forward)])
def test_a_wrapper_runs_around_the_graphs_without_another_capture(wrap: Any) -> None:
    model = parallel()
    captures = len(model.hetu.stats["captures"])
    for factor in (0.5, 0.25):
        model.forward = wrap(model) if factor == 0.5 else _closure(model)
        assert ratio(model) == pytest.approx(factor)
    assert len(model.hetu.stats["captures"]) == captures
    assert model.hetu.stats["steps"] == 2


def test_wrappers_of_several_libraries_around_each_other_lead_to_ours() -> None:
    model = parallel()
    for _ in range(4):  # as trl's and accelerate's are: autocast, and a cast of outputs
        model.forward = MethodType(functools.partial(lambda before, _, x: before(x=x), model.forward), model)
        assert ratio(model) == pytest.approx(1)
    assert len(model.hetu.stats["captures"]) == 1


def test_a_wrapper_that_calls_nothing_is_refused_by_name() -> None:
    model = parallel()
    before = model.forward
    model.forward = lambda x: doubled(model, x) if before else None
    with pytest.raises(StateError, match=r"<lambda> \(test_forwards.py.*has not called it"):
        model(**BATCH)


def test_a_forward_without_a_signature_is_refused_by_name() -> None:
    model = parallel()
    model.forward = dict.update
    with pytest.raises(StateError, match="has no signature that Python can read"):
        model(**BATCH)


def test_copies_have_the_assigned_forward_and_are_called_before_it_is_replaced_there() -> None:
    model = parallel()
    model.forward = MethodType(doubled, model)
    copied, other = copy.deepcopy(model), copy.deepcopy(model)
    assert ratio(copied) == pytest.approx(2)
    other.forward = MethodType(doubled, other)
    with pytest.raises(StateError, match="before its first call"):
        other(**BATCH)


def test_a_module_that_runs_as_it_is_takes_another_forward_too() -> None:
    model: Any = hetu_fx.auto_parallelize(Net(), BATCH, plan=hetu_fx.Plan.single(0), capture="eager")
    model.forward = MethodType(doubled, model)
    assert ratio(model) == pytest.approx(2)


def test_inside_whole_the_assigned_forward_runs() -> None:
    model = parallel()
    model.forward = MethodType(doubled, model)
    assert ratio(model) == pytest.approx(2)
    with model.hetu.whole(), torch.no_grad():
        assert ratio(model) == pytest.approx(2)


def test_a_model_that_was_compiled_in_place_runs_as_ever() -> None:
    model = parallel()
    model.compile(backend="eager")
    assert ratio(model) == pytest.approx(1)
    captures = len(model.hetu.stats["captures"])
    model.forward = MethodType(doubled, model)
    assert ratio(model) == pytest.approx(2)
    assert ratio(model) == pytest.approx(2)
    assert len(model.hetu.stats["captures"]) <= captures + 1
