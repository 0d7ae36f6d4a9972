"""transformers: files that `from_pretrained` reads, generation, what models call inputs of sequences, evaluation.

`save_pretrained` of a parallel model holds one whole tensor at a time, on the rank that saves. It names and shares out
files by tensors that name their storages; what writes a file gets the whole of each when its turn comes.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from hetu_fx import (
    Framework,
    Handle,
    LossType,
    WeightNames,
    is_parallel,
    named_storages,
    register_framework,
    save_file,
)
from hetu_fx.base.patches import Patch, register_patch


def _save_streamed(model: nn.Module) -> None:
    """Have a model of transformers save itself a tensor at a time."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is not None and isinstance(model, kind):
        object.__setattr__(model, "save_pretrained", named_storages()(model.save_pretrained))


register_patch(
    Patch(
        "transformers", "transformers.modeling_utils", "", "safe_save_file",
        "save_pretrained of a parallel model would hold all of a file's tensors, whole, on the rank that saves", "5.24",
        lambda _: save_file,
    )
)  # fmt: skip


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
class _Ties(Protocol):
    """A model that says itself which of its parameters are one."""

    def tie_weights(self) -> Any:
        """Make them one."""


def _tie(model: nn.Module) -> None:
    if isinstance(model, _Ties):
        model.tie_weights()


@runtime_checkable
class _Loads(Protocol):
    """A model that is loaded by `from_pretrained`."""

    base_model_prefix: str
    config: Any
    from_pretrained: Any

    def state_dict(self) -> dict[str, Any]:
        """Return its tensors by name."""


def _stored_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return a model's names by those, of the names in files, under which transformers finds them when it loads.

    What it puts together of several tensors has none.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    conversions = sys.modules.get("transformers.conversion_mapping")
    if loading is None or conversions is None or not isinstance(model, _Loads):
        return {}
    own = model.state_dict()
    mapping = conversions.get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    found = {}
    for name in names:
        renamed, converter = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converter is None and renamed != name and renamed in own:
            found[name] = renamed
    return found


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


def _adopt(model: nn.Module) -> None:
    _generate_whole(model)
    _save_streamed(model)


def _token_paddings(model: nn.Module) -> dict[str, int]:
    """Return the token that a model's inputs of tokens are padded with, if its configuration names one."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return dict.fromkeys(("input_ids", "decoder_input_ids"), token) if isinstance(token, int) and token >= 0 else {}


class _LastRows(dict[str, Any]):
    """A rank's inputs of an evaluation's last batch, without the rows that fill it up."""


def _without_repeats(trainer: Any, model: Any, inputs: Any) -> _LastRows | None:
    """Return a rank's own rows of a last batch that accelerate has filled up with rows from the start; else None.

    Alike on all ranks. Where the loss is worked out from outputs it is of a rank's own rows, and stays as it is.
    """
    accelerator, state = trainer.accelerator, trainer.accelerator.gradient_state
    if isinstance(inputs, _LastRows) or not isinstance(inputs, Mapping) or not hasattr(model, "hetu"):
        return None
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None or not state.end_of_dataloader:
        return None
    rows = next((len(given) for given in inputs.values() if isinstance(given, Tensor) and given.dim()), 0)
    if not 0 < state.remainder < rows * accelerator.num_processes:
        return None
    kept = min(max(state.remainder - rows * accelerator.process_index, 0), rows)
    return _LastRows({name: _first(kept, rows, given) for name, given in inputs.items()})


def _first(kept: int, rows: int, given: Any) -> Any:
    return given[:kept] if isinstance(given, Tensor) and given.dim() and len(given) == rows else given


def counting_rows_once(prediction_step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Trainer's step of evaluation give the loss of each row once, as on one device."""

    @functools.wraps(prediction_step)
    def counting_rows_once(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **options: Any
    ) -> Any:
        once = _without_repeats(self, model, inputs)
        if once is None:
            return prediction_step(self, model, inputs, prediction_loss_only, ignore_keys, **options)
        loss, _, _ = prediction_step(self, model, once, True, ignore_keys)
        if prediction_loss_only:
            return loss, None, None
        _, *values = prediction_step(self, model, inputs, False, ignore_keys, **options)
        return loss, *values

    return counting_rows_once


def _counting_on_all(get_num_items: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Trainer count the items of a batch over all processes, as their loss is that of all rows."""

    @functools.wraps(get_num_items)
    def counting_on_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_parallel(self.model) and self.args.world_size > 1:
            self.args.average_tokens_across_devices = True
        return get_num_items(self, *args, **kwargs)

    return counting_on_all


def _counting_processes_once(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Trainer leave the loss of a parallel model as it is where that is a mean over all rows already.

    It multiplies by the number of processes what it takes for divided by the items of all of them: also the loss of
    models that take `num_items_in_batch` by `**kwargs`, and leave it alone.
    """

    @functools.wraps(compute_loss)
    def counting_processes_once(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = compute_loss(self, model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        is_multiplied = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        is_models = self.label_smoother is None and self.compute_loss_func is None
        loss_type = model.hetu.loss_type if hasattr(model, "hetu") else None
        if not (is_multiplied and is_models) or loss_type in (None, LossType.SUM):
            return found
        loss, *outputs = found if return_outputs else (found,)
        loss = loss / self.accelerator.num_processes
        return (loss, *outputs) if return_outputs else loss

    return counting_processes_once


_REPEATS = "the loss of evaluation would count rows twice that fill up the last batch of all processes"

register_patch(
    Patch("transformers", "transformers.trainer", "Trainer", "prediction_step", _REPEATS, "5.24", counting_rows_once)
)
register_patch(
    Patch(
        "transformers", "transformers.trainer_seq2seq", "Seq2SeqTrainer", "prediction_step", _REPEATS, "5.24",
        counting_rows_once,
    )
)  # fmt: skip
register_patch(
    Patch(
        "transformers", "transformers.trainer", "Trainer", "_get_num_items_in_batch",
        "average_tokens_across_devices=False would divide the loss of all rows by the items of one process", "5.24",
        _counting_on_all,
    )
)  # fmt: skip
register_patch(
    Patch(
        "transformers", "transformers.trainer", "Trainer", "compute_loss",
        "the loss of models that leave num_items_in_batch alone (T5) would be multiplied by the processes", "5.24",
        _counting_processes_once,
    )
)  # fmt: skip
register_framework(
    Framework(
        name="transformers",
        adopt=_adopt,
        tie=_tie,
        stored_names=_stored_names,
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
