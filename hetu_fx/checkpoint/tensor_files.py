"""Tensors in safetensors files: in parts, or whole by name, as a framework's loaders find them.

Of tensors in parts every rank writes the elements that it counts, and anyone reads what it owns. A file's header says
which box of which tensor each entry is. A tensor is known by a name and a key (of optimizer state; "" for the parameter
itself). Whole ones, consolidated weights, have an index of files. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import index
from hetu_fx.annotations.region import Box, Interval
from hetu_fx.base.frameworks import weight_names
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.layout import Chunk, meeting
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.tensor import mark_written

Bounds = tuple[Interval, ...]
Key = tuple[str, str]


def whole_tensor(name: str) -> Key:
    """Return the key of a parameter or a buffer itself."""
    return name, ""


@dataclass
class RankShards:
    """Copies in host memory of what one rank counts of several tensors, and where each lies in its tensor."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    boxes: dict[str, tuple[str, str, Bounds]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[tuple[Key, Tensor]], rank: int) -> RankShards:
        """Copy this rank's part; plain tensors are the same everywhere, so that rank 0 has them."""
        made = cls()
        for (name, key), tensor in tensors:
            for number, (box, piece) in enumerate(_counted(tensor, rank)):
                entry = f"{name}/{key}/{number}"
                made.tensors[entry] = piece.detach().to("cpu").contiguous().clone()
                made.boxes[entry] = (name, key, box.bounds)
        return made

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the pieces to one file, with their boxes and `metadata` in its header.

        Raises OSError, SafetensorError.
        """
        save_file(self.tensors, str(path), metadata={**metadata, "boxes": json.dumps(self.boxes)})


def _counted(value: Tensor, rank: int) -> Iterator[tuple[Box, Tensor]]:
    if isinstance(value, HomeTensor):
        for box, place in value.home_layout.counted_chunks:
            yield box, value.local[index(place)]
    elif rank == 0:
        yield Box(tuple((0, size) for size in value.shape)), value


@dataclass(frozen=True, slots=True)
class SavedBox:
    """One box of one tensor in one file."""

    file: Path
    entry: str
    bounds: Bounds


class BoxFiles:
    """Files of boxes, open for reading; together they hold whole tensors, or the part that is wanted here."""

    def __init__(self, paths: Iterable[Path], where: Path) -> None:
        self.where = where
        self.boxes: dict[Key, list[SavedBox]] = {}
        self._files: dict[Path, Any] = {}
        for path in paths:
            for entry, (key, bounds) in boxes_in(self.file(path)).items():
                self.boxes.setdefault(key, []).append(SavedBox(path, entry, bounds))

    def file(self, path: Path) -> Any:
        """Return an open file."""
        if path not in self._files:
            self._files[path] = open_safetensors(path)
        return self._files[path]

    def fill(self, key: Key, target: Tensor) -> None:
        """Fill a tensor, home (this rank's piece only) or plain, from the saved boxes that meet it.

        Raises CheckpointError where elements or the dtype differ from what is saved.
        """
        if isinstance(target, HomeTensor):
            layout = target.home_layout
            self._fill(key, target.local, list(zip(layout.boxes, layout.region.local_boxes, strict=False)))
            mark_written([target])
        else:
            everything = Box(tuple((0, size) for size in target.shape))
            self._fill(key, target, [(everything, everything)])

    def _fill(self, key: Key, dense: Tensor, chunks: Sequence[Chunk]) -> None:
        filled = 0
        for saved in self.boxes.get(key, []):
            for box, place in chunks:
                common = meeting(saved.bounds, box.bounds)
                if common is not None:
                    stored = self.file(saved.file).get_slice(saved.entry)
                    value = _read_box(stored, _within(common, saved.bounds, None))
                    if value.dtype != dense.dtype:
                        raise CheckpointError(
                            f"{self.where} has {_spelled(key)} in {value.dtype}, which is {dense.dtype} here"
                        )
                    dense[_within(common, box.bounds, place.bounds)].copy_(value)
                    filled += value.numel()
        wanted = sum(math.prod(stop - start for start, stop in box.bounds) for box, _ in chunks)
        if filled != wanted:
            raise CheckpointError(
                f"{self.where} holds {filled} of {wanted} elements of {_spelled(key)}: a rank's file is missing"
            )


def _read_box(stored: Any, where: tuple[slice, ...]) -> Tensor:
    """Read a box of a stored tensor (a scalar for no dims)."""
    box: Tensor = stored[where]
    return box


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file lazily. Raises CheckpointError where it is missing or torn."""
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def boxes_in(file: Any) -> dict[str, tuple[Key, Bounds]]:
    """Return (tensor, box) by entry of an open file."""
    header = json.loads((file.metadata() or {}).get("boxes", "{}"))
    return {
        entry: ((name, key), tuple((start, stop) for start, stop in bounds))
        for entry, (name, key, bounds) in header.items()
    }


def _within(common: Bounds, bounds: Bounds, place: Bounds | None) -> tuple[slice, ...]:
    """Return the index of a common box in the dense tensor where `bounds` stands at `place` (None: at 0)."""
    starts = [0] * len(bounds) if place is None else [start for start, _ in place]
    return tuple(
        slice(start - low + at, stop - low + at)
        for (start, stop), (low, _), at in zip(common, bounds, starts, strict=True)
    )


def _spelled(key: Key) -> str:
    return f"state {key[1]!r} of {key[0]!r}" if key[1] else repr(key[0])


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
        wholes = bring_to_first({name: tensors[name].detach() for name in names}, table)
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


def bring_to_first(tensors: Mapping[str, Tensor], table: GroupTable) -> dict[str, Tensor]:
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
        return shape, _read_box(stored, (slice(0, 0),) * len(shape)).dtype


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
