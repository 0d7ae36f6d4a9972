"""Tensors in safetensors files: in parts, or whole by name, as a framework's loaders find them.

Of tensors in parts every rank writes the elements that it counts, and anyone reads what it owns. A file's header says
which box of which tensor each entry is. A tensor is known by a name and a key (of optimizer state; "" for the parameter
itself). Whole ones, consolidated weights, have an index of files. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import index
from hetu_fx.annotations.region import Box, Interval
from hetu_fx.base.documents import told_as_damaged
from hetu_fx.base.dtypes import is_real
from hetu_fx.base.frameworks import weight_names
from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.checkpoint.summed_files import SummedFile, SummedWriter, TensorForm, file_order, write_with_checksums
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

        Raises OSError, CheckpointError.
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

    def check(self, key: Key, target: Tensor, *, casts: bool = False) -> None:
        """Compare the sums of all that `fill` would put into a tensor; the tensor is left as it is.

        With `casts`, real numbers may be of another dtype.

        Raises:
            CheckpointError: elements are missing, the dtype is another one, or a sum differs.
        """
        filled = 0
        for saved, there, _ in self._meetings(key, target):
            saved.file.check(saved.entry, there)
            value = saved.file.value(saved.entry)[there]
            if not fits_dtype(value.dtype, target.dtype, casts=casts):
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
            dense[here].copy_(saved.file.part(saved.entry, there))
        if isinstance(target, HomeTensor):
            mark_written([target])

    def _meetings(self, key: Key, target: Tensor) -> Iterator[tuple[SavedBox, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the saved boxes that meet a tensor, and where they do: in what is saved, and in what is here."""
        for saved in self.boxes.get(key, []):
            for box, place in _chunks_of(target):
                common = meeting(saved.bounds, box.bounds)
                if common is not None:
                    yield saved, _within(common, saved.bounds, None), _within(common, box.bounds, place.bounds)


def fits_dtype(stored: torch.dtype, wanted: torch.dtype, *, casts: bool) -> bool:
    """Tell whether numbers of a stored dtype may be read as another one: real ones as real ones, if they are cast.

    Those of one byte may not: they stand for what others, scales, say.
    """
    return stored == wanted or (casts and is_real(stored) and stored.itemsize > 1 and is_real(wanted))


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
    """Write whole tensors by name, each file by one rank, in turn: as many at once as there are ranks. Collective.

    A rank holds one whole tensor of its file at a time, and what it sends of the others'. Of plain tensors rank 0's are
    written. Raises CheckpointError, on the ranks whose file cannot be written, after all are through.
    """
    shards = plan_shards(tensors, max_shard_bytes)
    files, size = list(shards), table.size
    turns = [{file: shards[file] for file in files[start : start + size]} for start in range(0, len(files), size)]
    problem = next(filter(None, [_write_at_once(folder, turn, tensors, table) for turn in turns]), None)
    if problem is not None:
        raise CheckpointError(f"cannot write weights to {folder}: {problem}") from problem
    if table.rank == 0 and len(shards) > 1:
        _write_index(folder, shards, tensors)


def _write_at_once(
    folder: Path, shards: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor], table: GroupTable
) -> Exception | None:
    """Write one file on each of the first ranks, all at once; return why this rank's file could not be."""
    forms = [{name: _form(tensors[name]) for name in names} for names in shards.values()]
    mine = _MyFile()
    if table.rank < len(shards):
        mine.begin(folder / list(shards)[table.rank], forms[table.rank])
    for names in zip_longest(*map(file_order, forms)):
        owners = {name: rank for rank, name in enumerate(names) if name is not None}
        mine.write(bring(tensors, owners, table))
    mine.end()
    return mine.problem


class _MyFile:
    """The file that this rank writes, if any, and what was wrong with it: then nothing more is, as others wait."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self._writer: SummedWriter | None = None

    def begin(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        """Open the file of some tensors."""

        def begin() -> None:
            self._writer = SummedWriter(path, forms, weight_names().metadata).begin()

        self._do(begin)

    def write(self, found: Mapping[str, Tensor]) -> None:
        """Write the next tensor of the file, if one was found for it."""
        for whole in found.values():
            if self._writer is not None and self.problem is None:
                self._do(partial(self._writer.write, whole))

    def end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._do(partial(self._writer.end, is_whole=self.problem is None))

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, CheckpointError) as problem:
            self.problem = self.problem or problem


def _form(tensor: Tensor) -> TensorForm:
    return tensor.dtype, tuple(tensor.shape)


def save_file(tensors: Mapping[str, Tensor], filename: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write whole tensors to a safetensors file, as `safetensors.torch.save_file` does.

    One rank alone may call it; if all do, each writes a file and needs a name of its own. Of tensors of parallel models
    it holds one whole at a time; the other ranks send their shards. Metadata have the sums of the file's blocks.

    Args:
        tensors: plain ones, and those of parallel models and their state dicts, by name.
        filename: of the file, which is replaced.
        metadata: what its header says.

    Raises:
        OSError: it cannot be written.
        CheckpointError: a tensor cannot be in such a file.
    """
    if not any(isinstance(tensor, HomeTensor) for tensor in tensors.values()):
        safetensors.torch.save_file(dict(tensors), filename, None if metadata is None else dict(metadata))
        return
    forms = {name: _form(tensor) for name, tensor in tensors.items()}
    with SummedWriter(Path(filename), forms, metadata or {}) as writer:
        for name in writer.order:
            writer.write(_whole(tensors[name]))


def _whole(tensor: Tensor) -> Tensor:
    return _plain(tensor.gathered() if isinstance(tensor, HomeTensor) else tensor)


def _write_index(folder: Path, shards: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    numbers = {"total_size": total, "total_parameters": sum(tensor.numel() for tensor in tensors.values())}
    where = {name: file for file, names in shards.items() for name in names}
    text = json.dumps({"metadata": numbers, "weight_map": where}, indent=2, sort_keys=True)
    (folder / weight_names().index).write_text(text + "\n")


def bring_to_first(tensors: Mapping[str, Tensor], table: GroupTable) -> dict[str, Tensor]:
    """Return whole tensors in host memory on rank 0, nothing elsewhere, as `bring` does; collective."""
    return bring(tensors, dict.fromkeys(tensors, 0), table)


def bring(tensors: Mapping[str, Tensor], owners: Mapping[str, int], table: GroupTable) -> dict[str, Tensor]:
    """Bring whole tensors into the host memory of one rank each, in one message per pair of ranks; collective.

    Args:
        tensors: home tensors, and plain ones, of which rank 0's count.
        owners: the rank to which each is brought, by the names of those that are.
        table: the ranks.

    Returns those that are brought to this rank.
    """
    first, rank = Annotation.on((0,)), table.rank
    held = {name: tensors[name].detach() for name in owners}
    local = [tensor.local if isinstance(tensor, HomeTensor) else tensor for tensor in held.values()]
    moves = [
        TensorMove(
            tensor.home_layout.annotation if isinstance(tensor, HomeTensor) else first,
            Annotation.on((owners[name],)),
            tuple(tensor.shape),
            tensor.element_size(),
        )
        for name, tensor in held.items()
    ]
    pieces = [part if move.source.holds(rank) else None for move, part in zip(moves, local, strict=True)]
    found = run_moves(plan_moves(moves), pieces, table, like=local)
    return {name: _plain(whole) for name, whole in zip(held, found, strict=True) if owners[name] == rank}


def _plain(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # an owner receives every move of its own
    return tensor.detach().to("cpu", memory_format=torch.contiguous_format)


class WeightFiles(BoxFiles):
    """Consolidated weights, open for reading: each tensor is one box in one file, by `index`.

    Args:
        folder: in which they are.
        file: the file of tensors, or the index, that is meant; "": whichever is there under its usual name.
    """

    def __init__(self, folder: OpenFolder, file: str = "") -> None:
        super().__init__((), folder.path)
        self.index = _read_index(folder, file)
        self._files = {name: folder.tensors(name) for name in sorted(set(self.index.values()))}
        for name, opened in self._files.items():
            twice = next((tensor for tensor in opened.names if self.index.get(tensor, name) != name), None)
            if twice is not None:
                raise CheckpointError(
                    f"{self.where} holds {twice!r} twice: in {self.index[twice]}, as its index says, and in {name}"
                    "\nhint: save the weights again: nothing says which of the two counts"
                )

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a stored tensor, which can be filled from then on."""
        file = self._files[self.index[name]]
        value = file.value(name)
        bounds = tuple((0, size) for size in value.shape)
        self.boxes[whole_tensor(name)] = [SavedBox(file, name, bounds)]
        return tuple(value.shape), value.dtype


def _read_index(folder: OpenFolder, file: str) -> dict[str, str]:
    names = weight_names()
    index_name = file if file.endswith(".json") else "" if file else names.index
    if index_name and (file or (index_name in folder and names.whole not in folder)):  # as `from_pretrained` does
        index = folder.document(index_name)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{folder.path / index_name} is damaged: it has no 'weight_map' of names of files")
        return files
    if not file and names.whole not in folder:
        raise CheckpointError(
            f"{folder.path} holds no weights: neither {names.index} nor {names.whole} is there\n"
            f"hint: other formats are not read; save_pretrained writes this one"
        )
    whole = file or names.whole
    return dict.fromkeys(folder.tensors(whole).names, whole)
