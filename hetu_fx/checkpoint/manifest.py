"""The manifest of a folder: the size and a sum of each file that was written, by its relative path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import xxhash

from hetu_fx.base.documents import open_regular, parse_json, told_as_damaged
from hetu_fx.checkpoint.summed_files import SummedFile
from hetu_fx.errors import CheckpointError

MANIFEST = "hetu_fx_manifest.json"
_FORMAT = "hetu_fx.folder/2"
_OLDER = "hetu_fx.folder/1"  # SHA-256 sums, of whole files

_READ_BYTES = 4 << 20

How = Literal["xxh3", "header_xxh3", "sha256"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of a file.

    Attributes:
        size: in bytes.
        how: what `sum` is of: all bytes (`xxh3`, `sha256`), or what a `SummedFile` says of itself (`header_xxh3`).
        sum: in hexadecimal digits.
    """

    size: int
    how: How
    sum: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Describe a file; of a summed one only the header is read. Raises CheckpointError."""
        size = path.stat().st_size
        if path.suffix == ".safetensors" and (found := SummedFile(path).sum):
            return cls(size, "header_xxh3", found)
        with open_regular(path, CheckpointError) as file:
            return cls(size, "xxh3", digest(file, "xxh3"))

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> FileEntry:
        """Read what `told` has written. Raises TypeError, ValueError, KeyError where it is another form."""
        ways: tuple[How, ...] = ("xxh3", "header_xxh3", "sha256")
        ((how, found),) = [(way, told[way]) for way in ways if way in told]
        size = told["bytes"]
        if type(size) is not int or size < 0 or type(found) is not str:
            raise ValueError(f"{dict(told)} is no size and sum")
        return cls(size, how, found)

    def told(self) -> dict[str, Any]:
        """Return it as a manifest has it."""
        return {"bytes": self.size, self.how: self.sum}


def digest(file: BinaryIO, how: How) -> str:
    """Return the sum of all bytes of an open file."""
    found = hashlib.sha256() if how == "sha256" else xxhash.xxh3_64()
    while block := file.read(_READ_BYTES):
        found.update(block)
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder says of its files.

    Attributes:
        files: what each is, by relative path.
        identity: a number of 48 bits; folders of one are copies of one another.
    """

    files: Mapping[str, FileEntry]
    identity: int

    @classmethod
    def read(cls, data: bytes, where: Path) -> Manifest:
        """Read a manifest; `where` it stands is told in errors.

        Raises:
            CheckpointError: it is damaged, of another format, or names files outside its folder.
        """
        told = parse_json(data, str(where), CheckpointError)
        known = told.get("format") if isinstance(told, dict) else None
        if known not in (_FORMAT, _OLDER):
            raise CheckpointError(f"{where} has format {known!r}, expected {_FORMAT!r}\nhint: use a newer hetu_fx")
        with told_as_damaged(str(where), CheckpointError):
            files = {name: FileEntry.read(entry) for name, entry in sorted(told["files"].items())}
        for name in files:
            checked_name(name, where)
        return cls(MappingProxyType(files), xxhash.xxh3_64_intdigest(data) & (1 << 48) - 1)


def manifest_text(files: Mapping[str, FileEntry]) -> str:
    """Return a manifest's text."""
    told = {name: entry.told() for name, entry in files.items()}
    return json.dumps({"format": _FORMAT, "files": told}, indent=1, sort_keys=True) + "\n"


def checked_name(name: str, where: Path) -> str:
    """Return the name of a file, relative to its folder. Raises CheckpointError where it leads out of that."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or not place.parts:
        raise CheckpointError(f"{where} names {name!r}, which is no file inside its folder")
    return name
