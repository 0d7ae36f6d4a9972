"""Safetensors files in which every block of every tensor has a sum, which whoever reads it compares.

The sums stand in a file's metadata, so that they travel with it, and are made of what is in memory: nothing is read
again to write them. The metadata have a sum of their own, over dtypes and shapes too, which says what a file holds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from hetu_fx.base.documents import open_regular, parse_json, usual_mode
from hetu_fx.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""What is summed at once: as much of a tensor is read more than is wanted, at most twice."""

_SUMS, _SUM = "hetu_fx.sums", "hetu_fx.sum"
_HANDLES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def write_with_checksums(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors in host memory to a file, with their sums, for whoever may read files of this user's.

    Raises OSError, SafetensorError.
    """
    sums = {name: _sums_of(_bytes_of(tensor)) for name, tensor in tensors.items()}
    told = {**metadata, _SUMS: json.dumps(sums)}
    forms = {name: (_dtype(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    save_file(dict(tensors), str(path), metadata={**told, _SUM: _sum_of_header(told, forms)})
    os.chmod(path, usual_mode())


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
        raise CheckpointError(f"cannot read {path}: {error}") from error


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
