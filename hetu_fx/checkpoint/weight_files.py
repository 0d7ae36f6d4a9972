"""Consolidated weights, in files that a framework's loaders find: whole tensors by name, safetensors, with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.frameworks import weight_names
from hetu_fx.checkpoint.shard_files import BoxFiles, SavedBox, open_safetensors, read_box, whole_tensor
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.ops import HomeTensor


def plan_shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, list[str]]:
    """Share names out over files in their order, each file up to a size; a larger tensor has its own.

    The cut is that of `huggingface_hub.split_torch_state_dict_into_shards`, file names included.
    """
    kept: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > max_shard_bytes:
            kept.append([name])
            continue
        if current and filled + size > max_shard_bytes:
            kept.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current or not kept:
        kept.append(current)
    files = weight_names()
    if len(kept) == 1:
        return {files.whole: kept[0]}
    return {files.part.format(number=i, count=len(kept)): names for i, names in enumerate(kept, 1)}


def write_weights(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int, table: GroupTable) -> None:
    """Write whole tensors by name, on rank 0, which holds one file's tensors at a time. Collective.

    Home tensors are brought to rank 0; of plain tensors rank 0's are written. Raises CheckpointError on rank 0
    after all ranks are through where a file cannot be written.
    """
    shards = plan_shards(tensors, max_shard_bytes)
    failed: OSError | SafetensorError | None = None
    for file, names in shards.items():
        wholes = _bring_to_first({name: tensors[name].detach() for name in names}, table)
        if table.rank == 0 and failed is None:
            try:
                save_file(wholes, str(folder / file), metadata=dict(weight_names().metadata))
            except (OSError, SafetensorError) as error:
                failed = error
    if failed is not None:
        raise CheckpointError(f"cannot write weights to {folder}: {failed}") from failed
    if table.rank == 0 and len(shards) > 1:
        _write_index(folder, shards, tensors)


def _write_index(folder: Path, shards: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    numbers = {"total_size": total, "total_parameters": sum(tensor.numel() for tensor in tensors.values())}
    where = {name: file for file, names in shards.items() for name in names}
    text = json.dumps({"metadata": numbers, "weight_map": where}, indent=2, sort_keys=True)
    (folder / weight_names().index).write_text(text + "\n")


def _bring_to_first(tensors: Mapping[str, Tensor], table: GroupTable) -> dict[str, Tensor]:
    """Return whole tensors in host memory on rank 0, nothing elsewhere, in one message per pair of ranks."""
    homes = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, HomeTensor)}
    moves = [
        TensorMove(home.home_layout.annotation, Annotation.on((0,)), tuple(home.shape), home.element_size())
        for home in homes.values()
    ]
    pieces = [home.local if home.home_layout.annotation.holds(table.rank) else None for home in homes.values()]
    found = run_moves(plan_moves(moves), pieces, table, like=[home.local for home in homes.values()])
    wholes = dict(zip(homes, found, strict=True))
    if table.rank:
        return {}
    return {name: _plain(wholes.get(name, tensor)) for name, tensor in tensors.items()}


def _plain(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # rank 0 receives every move
    plain = tensor.detach().to("cpu", memory_format=torch.contiguous_format)
    # safetensors refuses tensors that share memory; views of one buffer do.
    return plain.clone() if plain.untyped_storage().nbytes() != plain.nbytes else plain


class WeightFiles(BoxFiles):
    """Consolidated weights, open for reading: each tensor is one box in one file, by `index`."""

    def __init__(self, folder: Path) -> None:
        super().__init__((), folder)
        self.index = _read_index(folder)

    def form_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a stored tensor, which can be filled from then on."""
        path = self.where / self.index[name]
        try:
            stored = self.file(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} does not hold {name!r}, which the index places there: {error}") from error
        shape = tuple(stored.get_shape())
        self.boxes[whole_tensor(name)] = [SavedBox(path, name, tuple((0, size) for size in shape))]
        return shape, read_box(stored, (slice(0, 0),) * len(shape)).dtype


def _read_index(folder: Path) -> dict[str, str]:
    names = weight_names()
    if (folder / names.index).is_file():
        try:
            return dict(json.loads((folder / names.index).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / names.index} is damaged: {error}") from error
    if not (folder / names.whole).is_file():
        raise CheckpointError(f"{folder} holds no weights: neither {names.index} nor {names.whole} is there")
    with open_safetensors(folder / names.whole) as file:
        return dict.fromkeys(file.keys(), names.whole)
