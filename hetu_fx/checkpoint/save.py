"""Save and load a parallel model: whole tensors under the user's names, training state beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.frameworks import config_writer
from hetu_fx.checkpoint.checkpoint import MAX_SHARD_SIZE, load_consolidated, load_training_state, save_checkpoint
from hetu_fx.comm_ops.wire.groups import using
from hetu_fx.switching.runtime import Runtime


def save_model(
    runtime: Runtime,
    folder: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a checkpoint, all of it or none; collective.

    Args:
        runtime: what runs the model.
        folder: replaced as a whole once the new one is complete.
        optimizer: its state is written too, by parameter name.
        extra: any JSON object to keep with the optimizer's state (step, scheduler, data position).
        max_shard_size: bytes per weight file, or text such as "5GB".

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    runtime.in_flight.settle()
    with using(runtime.table):
        runtime.buffers.sync()
        save_checkpoint(
            folder,
            tensors_of(runtime),
            aliases=_aliases_of(runtime.model),
            write_config=config_writer(runtime.model),
            max_shard_size=max_shard_size,
            optimizer=optimizer,
            parameters=runtime.homes,
            extra={"hetu_fx_step": runtime.step, **(extra or {})},
            table=runtime.table,
        )


def load_model(
    runtime: Runtime, folder: Path, *, optimizer: torch.optim.Optimizer | None = None, verify: bool = False
) -> dict[str, Any]:
    """Read a checkpoint that any number of ranks under any plan wrote; collective.

    Args:
        runtime: what runs the model.
        folder: a checkpoint of `save_model`, or weights that `save_pretrained` wrote.
        optimizer: gets its state back, if it was saved.
        verify: compare SHA-256 sums too.

    Returns the saved `extra`; empty without an optimizer.

    Raises:
        CheckpointError: on every rank; nothing has been changed then.
    """
    runtime.in_flight.settle()
    with using(runtime.table):
        aliases = _aliases_of(runtime.model)
        with torch.no_grad():
            load_consolidated(folder, tensors_of(runtime), aliases=aliases, verify=verify, table=runtime.table)
        if optimizer is None:
            return {}
        extra = load_training_state(folder, optimizer, runtime.homes, verify=verify, table=runtime.table)
    runtime.resume(int(extra.pop("hetu_fx_step", runtime.step)))
    return extra


def tensors_of(runtime: Runtime) -> dict[str, Tensor]:
    """Return all that a checkpoint holds, by the user's names: home parameters and persistent buffers."""
    kept = set(runtime.model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in runtime.model.named_buffers() if name in kept}
    return {**runtime.homes, **buffers}


def _aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, and the first name that each is stored under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in everything if first[id(p)] != name}
