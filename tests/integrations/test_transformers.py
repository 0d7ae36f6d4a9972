"""A configuration that saves itself is written beside the weights, with the class of its model."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig

import hetu_fx
from hetu_fx.integrations.transformers import config_writer
from hetu_fx.plans.plan import Plan
from tests.model_zoo import llama


class Model(nn.Module):
    """A model that has a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=3)


def test_the_configuration_is_written_with_the_class_of_the_model(tmp_path: Path) -> None:
    model = Model()
    write = config_writer(model)
    assert write is not None
    write(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_hidden_layers"] == 3
    assert written["architectures"] == ["Model"]
    assert model.config.architectures is None, "the model's own stays as it is"


def test_a_model_without_configuration_has_nothing_to_write() -> None:
    assert config_writer(nn.Linear(2, 2)) is None


def test_generation_runs_on_plain_parameters_and_keeps_its_signature() -> None:
    torch.manual_seed(0)
    model = llama().eval()
    prompt = torch.ones(2, 4, dtype=torch.long)
    signature, options = inspect.signature(model.generate), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    batch = {"input_ids": prompt, "labels": prompt.clone()}
    model = hetu_fx.auto_parallelize(model.train(), batch, plan=Plan.single()).eval()
    seen: list[type] = []
    model.lm_head.register_forward_hook(lambda module, given, made: seen.append(type(module.weight)))
    assert torch.equal(model.generate(prompt, **options), expected)
    assert set(seen) == {nn.Parameter}
    assert inspect.signature(model.generate) == signature
