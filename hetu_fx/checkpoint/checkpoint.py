"""Saving and loading by logical tensor: any plan and number of processes writes, any other reads.

A checkpoint is one folder, there whole or not at all:

    model.safetensors, or numbered files and an index     whole tensors, as `from_pretrained` reads them
    config.json, ...                                      what the caller's `write_config` writes
    hetu_fx/training_state*                               optimizer state, by parameter name (no pickle)
    hetu_fx_manifest.json                                 sizes and sums, written last

Every function is collective over `table`, and the ranks share the file system. `save_model` and `load_model` are for a
parallel model, under the user's names; the others for any tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetu_fx.base.checks import size_parts
from hetu_fx.base.frameworks import config_writer
from hetu_fx.base.progress import telling
from hetu_fx.checkpoint.folders import find_folder, replaced_folder
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.checkpoint.optimizer_files import Parameters, RestoredTraining, TrainingFiles, write_training_state
from hetu_fx.checkpoint.tensor_files import Key, WeightFiles, fits_dtype, whole_tensor, write_weights
from hetu_fx.comm_ops.wire.consensus import alike, any_rank, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.runtime import Runtime

TRAINING = "hetu_fx"
# The default of save_pretrained; units are decimal there too.
MAX_SHARD_SIZE = "50GB"

# A writer needs the time between two renames to put a folder in place.
_TRIES, _PAUSE_SECONDS = 20, 0.05

_STEP = "hetu_fx_step"

T = TypeVar("T")


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
    with using(runtime.table), telling("saving a checkpoint"):
        runtime.writes.compare("model.hetu.save()")
        runtime.buffers.sync()
        save_checkpoint(
            folder,
            checkpoint_tensors(runtime),
            aliases=tied_names(runtime.model),
            write_config=config_writer(runtime.model),
            max_shard_size=max_shard_size,
            optimizer=optimizer,
            parameters=runtime.homes,
            extra={_STEP: runtime.step, **(extra or {})},
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
        verify: compare the sums of all files whole, not only of what this run reads.

    Returns the saved `extra`; empty without an optimizer.

    Raises:
        CheckpointError: on every rank; nothing has been changed then.
    """
    runtime.in_flight.settle()
    with using(runtime.table), telling("loading a checkpoint"):
        extra = load_checkpoint(
            folder,
            checkpoint_tensors(runtime),
            aliases=tied_names(runtime.model),
            optimizer=optimizer,
            parameters=runtime.homes,
            verify=verify,
            table=runtime.table,
        )
    runtime.resume(_step_of(extra, runtime.step))
    return {key: value for key, value in extra.items() if key != _STEP}


def saved_step(folder: Path) -> int:
    """Return how many steps the model of a checkpoint had seen; 0 where that was not saved. Raises CheckpointError."""
    with OpenFolder(find_folder(folder)) as opened:
        return _step_of(TrainingFiles.open(opened, TRAINING).extra, 0) if opened.has_folder(TRAINING) else 0


def _step_of(extra: Mapping[str, Any], otherwise: int) -> int:
    step = extra.get(_STEP, otherwise)
    if type(step) is not int or step < 0:
        raise CheckpointError(f"the checkpoint is damaged: its step is {step!r}\nhint: load another one")
    return step


def checkpoint_tensors(runtime: Runtime) -> dict[str, Tensor]:
    """Return all that a checkpoint holds, by the user's names: home parameters and persistent buffers."""
    kept = set(runtime.model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in runtime.model.named_buffers() if name in kept}
    return {**runtime.homes, **buffers}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, and the first name that each is stored under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in everything if first[id(p)] != name}


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    write_config: Callable[[Path], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Parameters | None = None,
    extra: Mapping[str, Any] | None = None,
    table: GroupTable,
) -> None:
    """Write weights and training state in one step, in place of `folder`: both are of one moment or neither is there.

    Args:
        folder: replaced as a whole when the new one is complete; until then it stays as it is.
        tensors: home tensors, or plain ones (rank 0's are written), by the user's names, alike on all ranks.
        aliases: names of tied tensors and the name that each is stored under; aliases are left out.
        write_config: writes what else belongs beside the weights; called on rank 0 with the folder to write in.
        max_shard_size: bytes per file, or text such as "5GB".
        optimizer: its state is written by parameter name.
        parameters: by name, those that the optimizer may hold.
        extra: any JSON object (step, scheduler, data position), kept with the optimizer's state.
        table: the ranks that take part.

    Raises CheckpointError (on all ranks, of one kind or another) where it cannot be written.
    """
    limit = parse_size(max_shard_size)
    stored = {name: tensor for name, tensor in tensors.items() if name not in (aliases or {})}
    with replaced_folder(folder, table) as staging:
        if stored:
            raise_on_all_ranks(table, lambda: write_weights(staging, stored, limit, table))
        if write_config is not None:
            raise_on_all_ranks(table, lambda: _write_config(write_config, staging) if table.rank == 0 else None)
        if optimizer is not None:
            training = staging / TRAINING
            raise_on_all_ranks(table, lambda: training.mkdir() if table.rank == 0 else None)
            names, own = parameters or {}, extra or {}
            raise_on_all_ranks(table, lambda: write_training_state(training, optimizer, names, own, table.rank))


def _write_config(write_config: Callable[[Path], None], staging: Path) -> None:
    try:
        write_config(staging)
    except Exception as error:
        raise CheckpointError(f"write_config failed: {type(error).__name__}: {error}") from error


def load_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    parameters: Parameters | None = None,
    verify: bool = False,
    file: str = "",
    foreign: bool = False,
    table: GroupTable,
) -> dict[str, Any]:
    """Read weights into tensors of any layout, and an optimizer's state; return the saved `extra`, empty without one.

    The aliases are further names under which tensors may be stored. `file` is the one that is meant of several, or an
    index. Weights of `foreign` programs are cast to the tensors' dtypes, and may hold other tensors besides.

    Each rank reads only what it owns, whatever layout and number of ranks wrote it, and compares the sums of that;
    with `verify`, those of everything in the folder. One without a manifest (that `save_pretrained` wrote) is read as
    it is. A folder that is replaced meanwhile is read once more. The optimizer must hold the same parameters, by name,
    in the same groups.

    Raises:
        CheckpointError: on all ranks, that lists what does not fit; no tensor, and nothing of the optimizer, has been
            changed then.
    """
    wanted = {name: tensor for name, tensor in tensors.items() if name not in (aliases or {})}

    def read(opened: OpenFolder) -> Checkpoint:
        if table.rank == 0 and (verify or opened.manifest is not None or opened.has_folder(TRAINING)):
            opened.check_sizes()
        opened.check_sums(_sums_of_all(opened, verify)[table.rank :: table.size])
        weights = stored_weights(opened, wanted, aliases or {}, file=file, foreign=foreign) if wanted else None
        return Checkpoint.read(opened, weights, optimizer, parameters or {})

    checkpoint = read_alike(folder, read, table)
    return raise_on_all_ranks(table, lambda: checkpoint.put(optimizer))


def _sums_of_all(opened: OpenFolder, verify: bool) -> list[str]:
    """Return the files of which all is to be summed: those of tensors whose parts have no sums, older ones, or all."""
    files = opened.manifest.files if opened.manifest else {}
    whole = {name for name, entry in files.items() if entry.how == "sha256" or name.endswith(".safetensors")}
    return [name for name, entry in files.items() if verify or (name in whole and entry.how != "header_xxh3")]


def read_alike(folder: Path, read: Callable[[OpenFolder], T], table: GroupTable) -> T:
    """Return what is read of a folder, on all ranks of the same one; collective. Raises what reading raises."""
    for tries_left in reversed(range(_TRIES)):
        with ExitStack() as held:
            opened: list[OpenFolder] = []
            try:
                found = raise_on_all_ranks(table, partial(_open_and_read, folder, read, held, opened))
            except Exception:  # on all ranks
                if not any_rank(table, [_is_replaced(folder, opened)])[0] or not tries_left:
                    raise
            else:
                manifest = opened[0].manifest
                if table.size == 1 or alike(table, manifest.identity if manifest else 0):
                    return found
        time.sleep(_PAUSE_SECONDS)
    raise CheckpointError(f"{folder} is replaced again and again while it is read\nhint: save to a folder per step")


def _open_and_read(folder: Path, read: Callable[[OpenFolder], T], held: ExitStack, opened: list[OpenFolder]) -> T:
    opened.append(held.enter_context(OpenFolder(find_folder(folder))))
    return read(opened[0])


def _is_replaced(folder: Path, opened: Sequence[OpenFolder]) -> bool:
    """Tell whether a writer is at work between what was tried and now."""
    if opened:
        return not opened[0].is_in_place()
    return folder.is_dir() or find_folder(folder) != folder


@dataclass(frozen=True)
class _StoredWeights:
    """Stored tensors, which fit those that they are read into by shape and dtype.

    Attributes:
        files: that hold them.
        tensors: the key of each, and what it is read into, by name.
        casts: real numbers are read in whatever dtype is wanted.
    """

    files: WeightFiles
    tensors: Mapping[str, tuple[Key, Tensor]]
    casts: bool

    def check(self) -> None:
        """Compare the sums of all that is read here. Raises CheckpointError."""
        for key, tensor in self.tensors.values():
            self.files.check(key, tensor, casts=self.casts)

    def put(self) -> None:
        """Read them."""
        with torch.no_grad():
            for key, tensor in self.tensors.values():
                self.files.fill(key, tensor)


def stored_weights(
    opened: OpenFolder, wanted: Mapping[str, Tensor], aliases: Mapping[str, str], *, file: str, foreign: bool
) -> _StoredWeights:
    """Find tensors in a folder, by headers alone; see `load_checkpoint`.

    Raises:
        CheckpointError: lists those that are missing, have other shapes or dtypes, or are none of the wanted.
    """
    files = WeightFiles(opened, file)
    names = _match_names(files, wanted, aliases, takes_others=foreign)
    _check_fit(files, wanted, names, casts=foreign)
    tensors = {name: (whole_tensor(names[name]), tensor) for name, tensor in wanted.items()}
    return _StoredWeights(files, tensors, foreign)


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a folder, and found to fit: nothing but memory is missing to put it in place."""

    weights: _StoredWeights | None
    training: RestoredTraining | None

    @classmethod
    def read(
        cls,
        opened: OpenFolder,
        weights: _StoredWeights | None,
        optimizer: torch.optim.Optimizer | None,
        parameters: Parameters,
    ) -> Checkpoint:
        """Read what is wanted here. Raises CheckpointError."""
        if weights is not None:
            weights.check()
        if optimizer is None:
            return cls(weights, None)
        training = TrainingFiles.open(opened, TRAINING).read(optimizer, parameters)
        _step_of(training.extra, 0)
        return cls(weights, training)

    def put(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Put it in place; returns the saved `extra`, empty without an optimizer."""
        if self.weights is not None:
            self.weights.put()
        if self.training is None or optimizer is None:
            return {}
        return self.training.put(optimizer)


def _match_names(
    files: WeightFiles, wanted: Mapping[str, Tensor], aliases: Mapping[str, str], *, takes_others: bool
) -> dict[str, str]:
    """Return the stored name of each tensor: its own, or that of one of its aliases."""
    names = {name: name for name in wanted if name in files.index}
    for alias, name in sorted(aliases.items()):
        if alias in files.index and name in wanted:
            names.setdefault(name, alias)
    missing = sorted(set(wanted) - set(names))
    others = sorted(set(files.index) - set(wanted) - set(aliases))
    if missing or (others and not takes_others):
        raise CheckpointError(
            f"{files.where} is of another model: missing in the file {_some(missing)}, unknown here {_some(others)}"
            "\nhint: give weights of this model, or make the model that they are of"
        )
    return names


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"[{', '.join(names[:8])}{more}]"


def _check_fit(files: WeightFiles, wanted: Mapping[str, Tensor], names: Mapping[str, str], *, casts: bool) -> None:
    misfits = []
    for name, tensor in wanted.items():
        shape, dtype = files.shape_and_dtype(names[name])
        if shape != tuple(tensor.shape) or not fits_dtype(dtype, tensor.dtype, casts=casts):
            misfits.append(f"{name}: {shape} {dtype} in the file, {tuple(tensor.shape)} {tensor.dtype} here")
    if misfits:
        raise CheckpointError(
            f"tensors of {files.where} do not fit: {'; '.join(misfits[:8])}"
            "\nhint: make the model with the sizes that its weights have"
        )


def parse_size(size: int | str) -> int:
    """Read a number of bytes, or text such as "500MB" (decimal units). Raises CheckpointError."""
    if isinstance(size, int):
        return size
    parts = size_parts(size, 1000)
    if parts is None or parts[0].count(".") > 1 or parts[0] == ".":
        raise CheckpointError(f"cannot read the size {size!r}\nhint: write bytes as a number, or text such as '5GB'")
    return int(float(parts[0]) * parts[1])
