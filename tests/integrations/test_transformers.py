"""A configuration that saves itself is written beside the weights, with the class of its model."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from transformers import LlamaConfig

from hetu_fx.integrations.transformers import config_writer


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
