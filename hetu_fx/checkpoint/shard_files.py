"""Parts of tensors in safetensors files: every rank writes the elements that it counts, anyone reads what it owns.

A file's header says which box of which tensor each entry is. A tensor is known by a name and a key (of optimizer
state; "" for the parameter itself). Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hetu_fx.annotations.local import index
from hetu_fx.annotations.region import Box, Interval
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
                    value = read_box(stored, _within(common, saved.bounds, None))
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


def read_box(stored: Any, where: tuple[slice, ...]) -> Tensor:
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
