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

import torch
from safetensors import SafetensorError
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import index
from hetu_fx.annotations.region import Box, Interval
from hetu_fx.base.documents import told_as_damaged
from hetu_fx.base.frameworks import weight_names
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.checkpoint.summed_files import SummedFile, write_with_checksums
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError
from hetu_fx.switching.home.layout import Chunk, meeting
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.tensor import mark_written

Bounds = tuple[Interval, ...]
Key = tuple[str, str]

_BOXES = "boxes"


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

    @property
    def num_bytes(self) -> int:
        """Return the size of all pieces."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the pieces to one file, with their boxes, their sums and `metadata` in its header.

        Raises OSError, SafetensorError.
        """
        write_with_checksums(path, self.tensors, {**metadata, _BOXES: json.dumps(self.boxes)})


def _counted(value: Tensor, rank: int) -> Iterator[tuple[Box, Tensor]]:
    if isinstance(value, HomeTensor):
        for box, place in value.home_layout.counted_chunks:
            yield box, value.local[index(place)]
    elif rank == 0:
        yield Box(tuple((0, size) for size in value.shape)), value


@dataclass(frozen=True, slots=True)
class SavedBox:
    """One box of one tensor in one file."""

    file: SummedFile
    entry: str
    bounds: Bounds


class BoxFiles:
    """Files of boxes, open for reading; together they hold whole tensors, or the part that is wanted here."""

    def __init__(self, files: Iterable[SummedFile], where: Path) -> None:
        self.where = where
        self.boxes: dict[Key, list[SavedBox]] = {}
        for file in files:
            for entry, (key, bounds) in read_boxes(file).items():
                self.boxes.setdefault(key, []).append(SavedBox(file, entry, bounds))

    def check_shape(self, key: Key, shape: Sequence[int]) -> None:
        """Compare the shape of a saved tensor, before memory is taken for it.

        Raises:
            CheckpointError: its boxes do not fill it.
        """
        boxes = [saved.bounds for saved in self.boxes.get(key, ())]
        ends = tuple(max(stops) for stops in zip(*([stop for _, stop in box] for box in boxes), strict=True))
        if (ends != tuple(shape) and 0 not in shape) or sum(map(math.prod, map(_sizes, boxes))) != math.prod(shape):
            raise CheckpointError(
                f"{self.where} holds boxes {boxes[:4]} of {_spelled(key)}, which do not make {tuple(shape)}"
            )

    def check(self, key: Key, target: Tensor) -> None:
        """Read all that `fill` would put into a tensor, and compare its sums; the tensor is left as it is.

        Raises:
            CheckpointError: elements are missing, the dtype is another one, or a sum differs.
        """
        filled = 0
        for saved, there, _ in self._meetings(key, target):
            saved.file.check(saved.entry, there)
            value = saved.file.value(saved.entry)[there]
            if value.dtype != target.dtype:
                raise CheckpointError(
                    f"{self.where} has {_spelled(key)} in {value.dtype}, which is {target.dtype} here"
                )
            filled += value.numel()
        wanted = sum(math.prod(stop - start for start, stop in box.bounds) for box, _ in _chunks_of(target))
        if filled != wanted:
            raise CheckpointError(
                f"{self.where} holds {filled} of {wanted} elements of {_spelled(key)}: a rank's file is missing"
            )

    def fill(self, key: Key, target: Tensor) -> None:
        """Fill a tensor, home (this rank's piece only) or plain, from what `check` has found to be there."""
        dense = target.local if isinstance(target, HomeTensor) else target
        for saved, there, here in self._meetings(key, target):
            dense[here].copy_(saved.file.value(saved.entry)[there])
        if isinstance(target, HomeTensor):
            mark_written([target])

    def _meetings(self, key: Key, target: Tensor) -> Iterator[tuple[SavedBox, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the saved boxes that meet a tensor, and where they do: in what is saved, and in what is here."""
        for saved in self.boxes.get(key, []):
            for box, place in _chunks_of(target):
                common = meeting(saved.bounds, box.bounds)
                if common is not None:
                    yield saved, _within(common, saved.bounds, None), _within(common, box.bounds, place.bounds)


def _chunks_of(target: Tensor) -> list[Chunk]:
    if isinstance(target, HomeTensor):
        layout = target.home_layout
        return list(zip(layout.boxes, layout.region.local_boxes, strict=False))
    everything = Box(tuple((0, size) for size in target.shape))
    return [(everything, everything)]


def read_boxes(file: SummedFile) -> dict[str, tuple[Key, Bounds]]:
    """Return (tensor, box) by entry of an open file.

    Raises:
        CheckpointError: they are not boxes of the file's tensors.
    """
    header = file.document(_BOXES, "{}")
    with told_as_damaged(f"{file.path}: its boxes", CheckpointError):
        boxes = {
            entry: ((name, key), tuple((start, stop) for start, stop in bounds))
            for entry, (name, key, bounds) in header.items()
        }
        fit = all(_sizes(bounds) == tuple(file.value(entry).shape) for entry, (_, bounds) in boxes.items())
    if not fit:
        raise CheckpointError(f"{file.path} is damaged: its boxes are not those of its tensors")
    return boxes


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


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
                write_with_checksums(folder / file, wholes, weight_names().metadata)
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

    def __init__(self, folder: OpenFolder) -> None:
        super().__init__((), folder.path)
        self.index = _read_index(folder)
        self._files = {name: folder.tensors(name) for name in sorted(set(self.index.values()))}

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a stored tensor, which can be filled from then on."""
        file = self._files[self.index[name]]
        value = file.value(name)
        bounds = tuple((0, size) for size in value.shape)
        self.boxes[whole_tensor(name)] = [SavedBox(file, name, bounds)]
        return tuple(value.shape), value.dtype


def _read_index(folder: OpenFolder) -> dict[str, str]:
    names = weight_names()
    if names.index in folder:
        index = folder.document(names.index)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{folder.path / names.index} is damaged: it has no 'weight_map' of names of files")
        return files
    if names.whole not in folder:
        raise CheckpointError(f"{folder.path} holds no weights: neither {names.index} nor {names.whole} is there")
    return dict.fromkeys(folder.tensors(names.whole).names, names.whole)
