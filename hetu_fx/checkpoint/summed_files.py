"""Safetensors files in which every block of every tensor has a sum, which whoever reads it compares.

The sums stand in a file's metadata, so that they travel with it, and are made of what is in memory: nothing is read
again to write them. The metadata have a sum of their own, over dtypes and shapes too, which says what a file holds.

A file is written tensor by tensor, so that no more than one of them is in memory. The header comes first and has the
sums, which are known last: they are of fixed length, so that it is written twice in the same place.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from hetu_fx.base.documents import open_regular, parse_json
from hetu_fx.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""What is summed at once: as much of a tensor is read more than is wanted, at most twice."""

_SUMS, _SUM = "hetu_fx.sums", "hetu_fx.sum"
_HANDLES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


TensorForm = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""

_CODES = {  # what the format calls dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED_BYTES = 8
_NO_SUM = "0" * 16


def write_with_checksums(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors in host memory to a file, with their sums, for whoever may read files of this user's.

    Raises OSError, CheckpointError.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SummedWriter(path, forms, metadata) as writer:
        for name in writer.order:
            writer.write(tensors[name])


class SummedWriter:
    """Writes a safetensors file with sums, a tensor at a time; a context manager, in which all of them are written.

    Args:
        path: of the file, which is replaced.
        forms: what it is to hold, by name.
        metadata: what its header says besides.

    Attributes:
        order: in which tensors are to be written: those of the widest dtypes first, so that each is aligned.

    Raises:
        CheckpointError: the format has no such dtype.
    """

    def __init__(self, path: Path, forms: Mapping[str, TensorForm], metadata: Mapping[str, str]) -> None:
        self.path, self._forms, self._metadata = path, forms, metadata
        for name, (dtype, _) in forms.items():
            if dtype not in _CODES:
                raise CheckpointError(f"cannot write {path}: {name!r} is {dtype}, which safetensors files cannot hold")
        self.order = file_order(forms)
        self._sums = {name: [_NO_SUM] * -(-_size(form) // BLOCK_BYTES) for name, form in forms.items()}
        self._next = 0

    def __enter__(self) -> SummedWriter:
        return self.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(is_whole=kind is None)

    def begin(self) -> SummedWriter:
        """Open the file. Raises OSError."""
        self._file = open(self.path, "wb")
        self._file.write(self._header())
        return self

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor of `order`: contiguous, in host memory, of the form that was told. Raises OSError."""
        name = self.order[self._next]
        form = tensor.dtype, tuple(tensor.shape)
        assert form == self._forms[name], f"{name!r} is {form}, not {self._forms[name]}"
        data = _bytes_of(tensor)
        self._sums[name] = _sums_of(data)
        self._file.write(data)
        self._next += 1

    def end(self, *, is_whole: bool) -> None:
        """Close the file, which is torn unless it `is_whole`: all its tensors have been written. Raises OSError."""
        with self._file:
            if is_whole:
                assert self._next == len(self.order), f"{self.order[self._next :]} have not been written"
                self._file.seek(0)
                self._file.write(self._header())

    def _header(self) -> bytes:
        """Return the header with the sums that are known; of one length, whatever they are."""
        told = {**self._metadata, _SUMS: json.dumps(self._sums)}
        forms = {name: (_dtype(dtype), list(shape)) for name, (dtype, shape) in self._forms.items()}
        entries: dict[str, Any] = {"__metadata__": {**told, _SUM: _sum_of_header(told, forms)}}
        start = 0
        for name in self.order:
            dtype, shape = self._forms[name]
            end = start + _size((dtype, shape))
            entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        return len(text).to_bytes(8, "little") + text


def file_order(forms: Mapping[str, TensorForm]) -> tuple[str, ...]:
    """Return the order of tensors in a file: those of the widest dtypes first, else as they are given."""
    return tuple(sorted(forms, key=lambda name: -forms[name][0].itemsize))


def _size(form: TensorForm) -> int:
    dtype, shape = form
    return math.prod(shape) * dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _sums_of(data: memoryview) -> list[str]:
    return [xxh3_64_hexdigest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sum_of_header(metadata: Mapping[str, str], forms: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps([dict(metadata), dict(forms)], sort_keys=True).encode())


class SummedFile:
    """A safetensors file, open for reading, with sums or without them.

    It stays readable where it is removed or replaced. Tensors are views of the file: nothing is read before it is used.
    """

    def __init__(self, path: Path, opened: BinaryIO | None = None) -> None:
        """Open a file, or take one over that is open.

        Raises:
            CheckpointError: it is missing, torn, no regular file, or its header is not the one that was written.
        """
        self.path = path
        with opened or open_regular(path, CheckpointError) as file:
            self._file = _safe_open(file, path)
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.names: tuple[str, ...] = tuple(self._file.keys())
        self._sums = self._read_sums()
        self._checked: set[tuple[str, int]] = set()

    @property
    def sum(self) -> str | None:
        """Return the sum of all that the file holds; None for a file without sums."""
        return self.metadata.get(_SUM)

    def value(self, name: str) -> Tensor:
        """Return a tensor as a view of the file. Raises CheckpointError where there is none of this name."""
        try:
            found: Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path} does not hold {name!r}: {error}") from error
        return found

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor as a view of the file: using it reads no other part. Raises as `value` does."""
        return self.value(name)[where]

    def document(self, key: str, default: str | None = None, *, constants: bool = False) -> Any:
        """Return what JSON the metadata have under a key. `constants` are NaN and Infinity. Raises CheckpointError."""
        text = self.metadata.get(key, default)
        if text is None:
            raise CheckpointError(f"{self.path} is damaged: there is no {key!r} in its metadata")
        return parse_json(text, f"{key!r} in {self.path}", CheckpointError, constants=constants)

    def check(self, name: str, where: tuple[slice, ...] | None = None) -> None:
        """Compare the sums of the blocks that a part of a tensor (None: all) is in; nothing without sums.

        Raises:
            CheckpointError: one differs.
        """
        if self._sums is None:
            return
        value = self.value(name)
        data, wanted = _bytes_of(value), self._sums[name]
        if len(wanted) != -(-len(data) // BLOCK_BYTES):
            raise CheckpointError(f"{self.path} is damaged: {name!r} has {len(wanted)} sums for {len(data)} bytes")
        for block in _blocks_of_part(value, where):
            if (name, block) in self._checked:
                continue
            start = block * BLOCK_BYTES
            if xxh3_64_hexdigest(data[start : start + BLOCK_BYTES]) != wanted[block]:
                end = min(start + BLOCK_BYTES, len(data))
                raise CheckpointError(
                    f"{self.path} is damaged: the sum of bytes {start} to {end} of {name!r} is not what was written"
                    "\nhint: load another checkpoint"
                )
            self._checked.add((name, block))

    def check_all(self) -> None:
        """Compare the sums of all blocks of all tensors. Raises CheckpointError."""
        for name in self.names:
            self.check(name)

    def _read_sums(self) -> dict[str, list[str]] | None:
        if _SUM not in self.metadata and _SUMS not in self.metadata:
            return None
        told = {key: text for key, text in self.metadata.items() if key != _SUM}
        forms: dict[str, Any] = {}
        for name in self.names:
            value = self.value(name)
            forms[name] = (_dtype(value.dtype), list(value.shape))
        if _sum_of_header(told, forms) != self.sum:
            raise CheckpointError(
                f"{self.path} is damaged: the sum of its header is not what was written\nhint: load another checkpoint"
            )
        sums: dict[str, list[str]] = self.document(_SUMS)
        if not isinstance(sums, dict) or sorted(sums) != sorted(self.names) or not all(map(_is_list, sums.values())):
            raise CheckpointError(f"{self.path} is damaged: its sums are not those of its tensors")
        return sums


def _safe_open(file: BinaryIO, path: Path) -> Any:
    # safetensors wants a path; that of the handle is the same file still, where another has taken its name.
    try:
        return safe_open(f"{_HANDLES}/{file.fileno()}", framework="pt")
    except (MemoryError, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}\nhint: it is torn, or no safetensors file: get it again"
        ) from error


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _blocks_of_part(value: Tensor, where: tuple[slice, ...] | None) -> range:
    """Return the blocks between the first and the last element of a part of a contiguous tensor."""
    part = value if where is None else value[where]
    if not part.numel():
        return range(0)
    first = part.storage_offset() - value.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    size = value.element_size()
    return range(first * size // BLOCK_BYTES, ((last + 1) * size - 1) // BLOCK_BYTES + 1)
