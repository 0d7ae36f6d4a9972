"""transformers: files that `from_pretrained` reads, and what its models call the inputs of sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hetu_fx import Framework, WeightNames, register_framework


@runtime_checkable
class SavesItself(Protocol):
    """A configuration that writes itself into a folder."""

    def save_pretrained(self, folder: str | Path) -> Any:
        """Write the configuration's file."""


def config_writer(model: nn.Module) -> Callable[[Path], None] | None:
    """Return what writes the model's configuration beside its weights, for a model that has one."""
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    writers = [config for config in configs if isinstance(config, SavesItself)]
    if not writers:
        return None

    def write(folder: Path) -> None:
        for config in writers:
            written = copy.deepcopy(config)
            if config is configs[0]:
                written.architectures = [type(model).__name__]  # type: ignore[attr-defined]
            written.save_pretrained(folder)

    return write


register_framework(
    Framework(
        name="transformers",
        config_writer=config_writer,
        weights=WeightNames(
            whole="model.safetensors",
            part="model-{number:05d}-of-{count:05d}.safetensors",
            index="model.safetensors.index.json",
            metadata={"format": "pt"},  # its loaders refuse files without it
        ),
        labels=("labels",),
        positions="position_ids",
    )
)
