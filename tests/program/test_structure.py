"""What a model consists of is compared before each step, and told in the same words on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hetu_fx.program.structure import Structure, differences
from tests.program.guarded import Guarded, Watching


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Quiet(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def doubles(module: nn.Module, given: Any, output: Any) -> Any:
    return output * 2


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a mode": (lambda m: m.norm.eval(), "training of module 'norm': True -> False"),
    "freezing": (lambda m: m.layer.bias.requires_grad_(False), "requires_grad of 'layer.bias': True -> False"),
    "a dtype": (lambda m: m.layer.double(), "'layer.weight': float32[2, 3] -> float64[2, 3]"),
    "a module of another class": (lambda m: setattr(m, "dropout", nn.Identity()), "module 'dropout': torch.nn"),
    "a module of the same kind": (lambda m: setattr(m, "layer", nn.Linear(3, 2)), "was replaced by one like it"),
    "a class": (lambda m: setattr(m.dropout, "__class__", Quiet), "module 'dropout': torch.nn.modules.dropout.Dropout"),
    "another module": (lambda m: m.add_module("more", nn.Linear(2, 2)), "module 'more': none -> torch.nn"),
    "a parameter less": (lambda m: setattr(m.layer, "bias", None), "'layer.bias': float32[2] -> None"),
    "a buffer's shape": (lambda m: m.register_buffer("one", torch.ones(1)), "'one': none -> float32[1]"),
    "tying": (lambda m: setattr(m.norm, "bias", m.layer.bias), "'norm.bias': float32[2] -> the same"),
    "a hook": (lambda m: m.layer.register_forward_hook(doubles), "forward hooks of module 'layer': none -> doubles"),
    "a pre-hook": (lambda m: m.layer.register_forward_pre_hook(doubles), "forward pre-hooks of module 'layer'"),
    "a backward hook": (lambda m: m.layer.register_full_backward_hook(doubles), "backward hooks of module 'layer'"),
    "a backward pre-hook": (lambda m: m.layer.register_full_backward_pre_hook(doubles), "backward pre-hooks of mod"),
    "a parametrization": (
        lambda m: parametrize.register_parametrization(m.layer, "weight", Doubled()),
        "module 'layer': torch.nn.modules.linear.Linear -> torch.nn.utils.parametrize.ParametrizedLinear",
    ),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_told(change: Callable[[Any], Any], told: str) -> None:
    model = Guarded()
    before = Structure(model)
    assert before.holds()
    change(model)
    assert not before.holds()
    after = Structure(model)
    assert after.holds()
    assert after.key != before.key
    assert told in "; ".join(differences(before.facts, after.facts) or ["was replaced by one like it"])


def test_another_value_of_a_parameter_is_another_object_for_which_the_same_graph_holds() -> None:
    model = Guarded()
    before = Structure(model)
    model.layer.weight = nn.Parameter(torch.zeros(2, 3))
    assert not before.holds()
    assert Structure(model).key == before.key


def test_hooks_of_the_model_itself_are_none_of_its_structure() -> None:
    model = Guarded()
    before = Structure(model)
    model.register_forward_hook(doubles)
    assert before.holds()


def test_equal_models_have_the_same_digest_and_others_do_not() -> None:
    model = Guarded()
    other = copy.deepcopy(model)
    assert Structure(model).digest == Structure(other).digest
    other.norm.eval()
    assert Structure(model).digest != Structure(other).digest


def test_a_structure_that_comes_back_is_the_one_it_was() -> None:
    watching = Watching()
    first = watching.programs
    training = first.structure
    watching.program()
    watching.model.eval()
    watching.program()
    watching.model.train()
    watching.program()
    assert first.structure is training or first.structure.key == training.key


def test_a_compiled_module_has_the_mode_of_what_it_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1] = torch.compile(model[1], backend="eager")
    before = Structure(model)
    assert before.holds()
    model[1].eval()
    assert not before.holds()
    model[1].train()
    assert before.holds()
