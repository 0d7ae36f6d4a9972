"""transformers: files that `from_pretrained` reads, generation, and what its models call the inputs of sequences."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hetu_fx import Framework, Handle, WeightNames, register_framework


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


@runtime_checkable
class _Generates(Protocol):
    """A model that generates sequences, by many calls of itself."""

    hetu: Handle

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it generates."""


def _generate_whole(model: nn.Module) -> None:
    """Have a model generate as the plain module: every process from its own prompts, nothing sent between its calls."""
    if not isinstance(model, _Generates):
        return
    generate = model.generate

    @functools.wraps(generate)
    def generate_inside(*args: Any, **kwargs: Any) -> Any:
        with model.hetu.whole():
            return generate(*args, **kwargs)

    object.__setattr__(model, "generate", generate_inside)


def _token_paddings(model: nn.Module) -> dict[str, int]:
    """Return the token that a model's inputs of tokens are padded with, if its configuration names one."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return dict.fromkeys(("input_ids", "decoder_input_ids"), token) if isinstance(token, int) and token >= 0 else {}


register_framework(
    Framework(
        name="transformers",
        adopt=_generate_whole,
        config_writer=config_writer,
        weights=WeightNames(
            whole="model.safetensors",
            part="model-{number:05d}-of-{count:05d}.safetensors",
            index="model.safetensors.index.json",
            metadata={"format": "pt"},  # its loaders refuse files without it
        ),
        labels=("labels",),
        positions="position_ids",
        paddings=_token_paddings,
        own_hooks=("transformers.",),  # they collect hidden states and attentions as outputs
    )
)
