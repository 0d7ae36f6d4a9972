"""A model's own initialisation, module by module: which modules belong together, streams, and what is left out."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetu_fx.checkpoint.own_init import OwnInit
from hetu_fx.errors import StateError
from tests.model_zoo import gpt2, llama

META = torch.device("meta")


def everything(name: str) -> bool:
    return True


def values(model: nn.Module, seed: int = 0, wanted: Any = None) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()] if wanted is None else wanted
    return dict(OwnInit(model, seed).values(names, everything))


def test_the_model_and_the_random_state_stay_as_they_are() -> None:
    with META:
        model = llama()
    before = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    made = values(model)
    assert made.keys() == dict(model.named_parameters()).keys()
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == before
    assert all(tensor.is_meta for tensor in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_distributed_as_the_model_says() -> None:
    with META:
        model: Any = gpt2(n_embd=120, n_layer=3, tie_word_embeddings=True)
    made = values(model)
    std = model.config.initializer_range
    assert float(made["transformer.h.0.attn.c_attn.weight"].std()) == pytest.approx(std, rel=0.05)
    scaled = std / math.sqrt(2 * 3)  # what the block around it draws last
    assert float(made["transformer.h.1.mlp.c_proj.weight"].std()) == pytest.approx(scaled, rel=0.05)
    assert torch.equal(made["transformer.ln_f.weight"], torch.ones(120))
    assert not made["transformer.h.0.attn.c_attn.bias"].any()


def test_modules_that_write_one_tensor_are_run_together_and_no_others() -> None:
    with META:
        model = gpt2()
    units = OwnInit(model, 0).units
    together = next(unit for unit in units if "transformer.h.0.mlp.c_proj.weight" in unit.names)
    assert {init.path for init in together.inits} == {"transformer.h.0.mlp", "transformer.h.0.mlp.c_proj"}
    assert together.names == {"transformer.h.0.mlp.c_proj.weight", "transformer.h.0.mlp.c_proj.bias"}


def test_each_module_has_a_stream_of_its_own() -> None:
    with META:
        model = llama()
    first, other = values(model), values(model, seed=1)
    drawn = [name for name, value in first.items() if value.dim() > 1]
    assert all(not torch.equal(first[name], other[name]) for name in drawn)
    one, two = (first[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not torch.equal(one, two)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(values(model, wanted=[name])[name], first[name])


def test_numbers_of_numpy_and_python_follow_from_the_seed_too() -> None:
    class Foreign(nn.Linear):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(torch.from_numpy(np.random.randn(*self.weight.shape)))
                self.bias.fill_(random.random())

    with META:
        model = nn.Sequential(Foreign(3, 4), Foreign(4, 2))
    before = random.getstate(), np.random.get_state()[1].tolist()
    both, second = values(model), values(model, wanted=["1.weight", "1.bias"])
    assert all(torch.equal(both[name], second[name]) for name in second)
    assert not torch.equal(both["1.weight"], values(model, seed=1)["1.weight"])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_initialisation_of_modules_may_take_more_that_it_need_not_be_given() -> None:
    class Named(nn.Sequential):
        def _init_weights(self, module: nn.Module, name: str = "") -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.5)

    with META:
        model = Named(nn.Linear(2, 3))
    assert values(model)["0.weight"].unique().tolist() == [0.5]


def test_an_initialisation_of_modules_that_needs_more_is_refused() -> None:
    class Scaled(nn.Sequential):
        def _init_weights(self, module: nn.Module, std: float) -> None:
            raise AssertionError("nobody knows the second argument")

    with META:
        model = nn.Sequential(Scaled(nn.Linear(2, 3)))
    with pytest.raises(StateError, match=r"_init_weights of 0 needs 2 arguments.*\nhint: give the others defaults"):
        values(model)


def test_only_what_is_needed_is_run() -> None:
    with META:
        model = llama()
    names = [name for name, _ in model.named_parameters()]
    made = dict(OwnInit(model, 0).values(names, lambda name: name.startswith("model.layers.0.mlp")))
    assert made.keys() == {name for name in names if name.startswith("model.layers.0.mlp")}


def test_writes_past_autograd_are_seen() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def reset_parameters(self) -> None:
            self.weight.data[0].fill_(1.0)
            self.weight.data[1:].fill_(2.0)
            self.count = torch.tensor(7)

    with META:
        model = Plain()
    made = values(model, wanted=["weight", "count"])
    assert made["weight"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert made["count"] == 7


def test_a_module_that_leaves_elements_without_a_value_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 2))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight[:1])

    with META:
        model = nn.Sequential(Half())
    with pytest.raises(StateError, match=r"'0.weight' would have no value \(6 of 8 elements\).*\nhint: give weights"):
        values(model)


def test_a_tensor_that_nothing_writes_is_named_with_its_module() -> None:
    with META:
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    with pytest.raises(StateError, match=r"'scale' would have no value: neither Sequential.reset_parameters"):
        OwnInit(model, 0).check(["0.weight", "scale"])


def test_an_initialisation_that_needs_numbers_runs_where_there_are_some() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 3))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight)
            self.weight /= float(self.weight.abs().max())

    with META:
        model = Scaled()
    assert float(values(model)["weight"].abs().max()) == 1.0


def test_an_initialisation_that_fails_names_its_module() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise ValueError("no numbers today")
            super().reset_parameters()

    with META:
        model = nn.Sequential(Broken(3, 4))
    with pytest.raises(StateError, match=r"module '0' cannot be initialised: ValueError: no numbers today\nhint"):
        values(model)


def test_tied_parameters_are_drawn_once() -> None:
    with META:
        model: Any = llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in values(model)
    assert values(model)["model.embed_tokens.weight"].std() > 0
