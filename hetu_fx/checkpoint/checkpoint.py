"""Saving and loading by logical tensor: any plan and number of processes writes, any other reads.

A checkpoint is one folder, there whole or not at all:

    model.safetensors, or numbered files and an index     whole tensors, as `from_pretrained` reads them
    config.json, ...                                      what the caller's `write_config` writes
    hetu_fx/training_state*                               optimizer state, by parameter name (no pickle)
    hetu_fx_manifest.json                                 sizes and SHA-256 sums, written last

Every function is collective over `table`, and the ranks share the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetu_fx.base.sizes import size_parts
from hetu_fx.checkpoint.folders import MANIFEST, check_folder, is_complete, latest, replaced_folder, settle
from hetu_fx.checkpoint.optimizer_files import Parameters, TrainingFiles, write_training_state
from hetu_fx.checkpoint.weight_files import WeightFiles, write_weights
from hetu_fx.comm_ops.wire.consensus import together
from hetu_fx.comm_ops.wire.groups import GroupTable, active
from hetu_fx.errors import CheckpointError

__all__ = [
    "is_complete",
    "latest",
    "load_consolidated",
    "load_training_state",
    "save_checkpoint",
    "save_consolidated",
    "save_training_state",
]

TRAINING = "hetu_fx"
# The default of save_pretrained; units are decimal there too.
MAX_SHARD_SIZE = "50GB"


def save_consolidated(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    write_config: Callable[[Path], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    table: GroupTable | None = None,
) -> None:
    """Write whole tensors by name, as Hugging Face lays them out, in place of `folder`.

    Args:
        folder: replaced as a whole when the new one is complete; until then it stays as it is.
        tensors: home tensors, or plain ones (rank 0's are written), by the user's names, alike on all ranks.
        aliases: names of tied tensors and the name that each is stored under; aliases are left out.
        write_config: writes what else belongs beside the weights; called on rank 0 with the folder to write in.
        max_shard_size: bytes per file, or text such as "5GB".
        table: the ranks that take part.

    Raises CheckpointError (on all ranks, of one kind or another) where it cannot be written.
    """
    save_checkpoint(
        folder,
        tensors,
        aliases=aliases,
        write_config=write_config,
        max_shard_size=max_shard_size,
        table=table,
    )


def save_training_state(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    extra: Mapping[str, Any] | None = None,
    *,
    table: GroupTable | None = None,
) -> None:
    """Write an optimizer's state by parameter name, in place of `folder`.

    `extra` is any JSON object (step, scheduler, data position). Raises CheckpointError.
    """
    save_checkpoint(folder, {}, optimizer=optimizer, parameters=parameters, extra=extra, table=table)


def save_checkpoint(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    write_config: Callable[[Path], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Parameters | None = None,
    extra: Mapping[str, Any] | None = None,
    table: GroupTable | None = None,
) -> None:
    """Write weights and training state in one step: both are of the same moment or neither is there.

    See `save_consolidated` and `save_training_state` for the arguments.
    """
    table = table or active()
    limit = parse_size(max_shard_size)
    stored = {name: tensor for name, tensor in tensors.items() if name not in (aliases or {})}
    with replaced_folder(Path(folder), table) as staging:
        if stored:
            together(table, lambda: write_weights(staging, stored, limit, table))
        if write_config is not None:
            together(table, lambda: _write_config(write_config, staging) if table.rank == 0 else None)
        if optimizer is not None:
            training = staging / TRAINING
            together(table, lambda: training.mkdir() if table.rank == 0 else None)
            names, own = parameters or {}, extra or {}
            together(table, lambda: write_training_state(training, optimizer, names, own, table.rank))


def _write_config(write_config: Callable[[Path], None], staging: Path) -> None:
    try:
        write_config(staging)
    except Exception as error:
        raise CheckpointError(f"write_config failed: {type(error).__name__}: {error}") from error


def load_consolidated(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    verify: bool = False,
    table: GroupTable | None = None,
) -> None:
    """Read weights into tensors of any layout; each rank reads only what it owns.

    A folder without a manifest (one that `save_pretrained` wrote) is read as it is. `verify` also checks
    SHA-256 sums. Nothing is changed unless names, shapes and dtypes all fit; raises CheckpointError that
    lists what does not.
    """
    folder, table = Path(folder), table or active()
    wanted = {name: tensor for name, tensor in tensors.items() if name not in (aliases or {})}
    together(table, lambda: _open_folder(folder, table.rank, verify))

    def load() -> None:
        with WeightFiles(folder) as files:
            names = _match_names(folder, files, wanted, aliases or {})
            _check_fit(folder, files, wanted, names)
            for name, tensor in wanted.items():
                files.read_into(names[name], tensor)

    together(table, load)


def load_training_state(
    folder: str | Path,
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    *,
    verify: bool = False,
    table: GroupTable | None = None,
) -> dict[str, Any]:
    """Read an optimizer's state, written under any layout and number of ranks; return the saved `extra`.

    The optimizer must hold the same parameters, by name, in the same groups. Raises CheckpointError.
    """
    folder, table = Path(folder), table or active()
    together(table, lambda: _open_folder(folder, table.rank, verify))
    return together(table, lambda: TrainingFiles.open(folder / TRAINING).load(optimizer, parameters))


def _open_folder(folder: Path, rank: int, verify: bool) -> None:
    if rank == 0:
        settle(folder)
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint at {folder}")
        if verify or (folder / MANIFEST).is_file() or (folder / TRAINING).is_dir():
            check_folder(folder, sums=verify)


def _match_names(
    folder: Path, files: WeightFiles, wanted: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return the stored name of each tensor: its own, or that of one of its aliases."""
    names = {name: name for name in wanted if name in files.where}
    for alias, name in sorted(aliases.items()):
        if alias in files.where and name in wanted:
            names.setdefault(name, alias)
    missing = sorted(set(wanted) - set(names))
    unexpected = sorted(set(files.where) - set(wanted) - set(aliases))
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} is of another model: missing in the file {_some(missing)}, unknown here {_some(unexpected)}"
        )
    return names


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"[{', '.join(names[:8])}{more}]"


def _check_fit(folder: Path, files: WeightFiles, wanted: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    misfits = []
    for name, tensor in wanted.items():
        stored = files.slice_of(names[name])
        found = (tuple(stored.get_shape()), files.dtype_of(names[name]))
        if found != (tuple(tensor.shape), tensor.dtype):
            misfits.append(f"{name}: {found[0]} {found[1]} in the file, {tuple(tensor.shape)} {tensor.dtype} here")
    if misfits:
        raise CheckpointError(f"tensors of {folder} do not fit: {'; '.join(misfits[:8])}")


def parse_size(size: int | str) -> int:
    """Read a number of bytes, or text such as "500MB" (decimal units). Raises CheckpointError."""
    if isinstance(size, int):
        return size
    parts = size_parts(size, 1000)
    if parts is None or parts[0].count(".") > 1 or parts[0] == ".":
        raise CheckpointError(f"cannot read the size {size!r}; write bytes as a number, or text such as '5GB'")
    return int(float(parts[0]) * parts[1])
