"""A folder that is read through one handle, so that what takes its place meanwhile is never mixed with it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self

import xxhash

from hetu_fx.base.documents import open_regular, parse_json, read_bytes
from hetu_fx.checkpoint.manifest import MANIFEST, FileEntry, Manifest, checked_name, digest
from hetu_fx.checkpoint.summed_files import SummedFile
from hetu_fx.errors import CheckpointError


class OpenFolder:
    """A folder, open for reading; one without a manifest (`save_pretrained` wrote it) is read as it is.

    A context manager; files that it gave stay readable when it is closed.
    """

    def __init__(self, path: Path) -> None:
        """Open a folder. Raises CheckpointError where there is none."""
        self.path = path
        self._tensors: dict[str, SummedFile] = {}
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"there is no checkpoint at {path}: {error.strerror}") from error

    @cached_property
    def manifest(self) -> Manifest | None:
        """Return what it says of its files; None where it has no manifest. Raises CheckpointError."""
        return Manifest.read(self._read(MANIFEST), self.path / MANIFEST) if self._is_file(MANIFEST) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)

    def __contains__(self, name: str) -> bool:
        return self._is_file(name) if self.manifest is None else name in self.manifest.files

    def has_folder(self, name: str) -> bool:
        """Tell whether there is a folder of this name in it."""
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._handle).st_mode)
        except OSError:
            return False

    def names(self, folder: str, suffix: str) -> list[str]:
        """Return the files of a folder in it that the manifest names, by the end of their names, sorted."""
        places = [PurePosixPath(name) for name in (self.manifest.files if self.manifest else ())]
        return sorted(str(place) for place in places if str(place.parent) == folder and place.suffix == suffix)

    def document(self, name: str, *, constants: bool = False) -> Any:
        """Read a JSON file, whose sum must be that of the manifest. `constants` are NaN and Infinity.

        Raises:
            CheckpointError: it cannot be read, or is not what was written.
        """
        data, entry = self._read(name), self._entry(name)
        if entry is not None and entry.how == "xxh3":
            self._compare(name, entry.sum, xxhash.xxh3_64_hexdigest(data))
        return parse_json(data, str(self.path / name), CheckpointError, constants=constants)

    def tensors(self, name: str) -> SummedFile:
        """Open a file of tensors, which must be the one of the manifest. Raises CheckpointError."""
        if name not in self._tensors:
            entry, found = self._entry(name), SummedFile(self.path / name, self._open(name))
            if entry is not None and entry.how == "header_xxh3":
                self._compare(name, entry.sum, found.sum)
            self._tensors[name] = found
        return self._tensors[name]

    def file(self, name: str) -> BinaryIO:
        """Open a file, all of whose bytes have the sum of the manifest. Raises CheckpointError."""
        self.check_sums([name])
        return self._open(name)

    def check_sizes(self) -> None:
        """Compare the sizes of all files with the manifest.

        Raises:
            CheckpointError: one differs, or there is no manifest.
        """
        if self.manifest is None:
            raise CheckpointError(f"{self.path} is incomplete: {MANIFEST} is missing\nhint: use latest(parent)")
        for name, entry in self.manifest.files.items():
            self._check_size(name, entry)

    def check_sums(self, names: Iterable[str]) -> None:
        """Compare the sums of all bytes of files that the manifest names. Raises CheckpointError."""
        for name in names:
            entry = self._entry(name)
            if entry is not None and entry.how == "header_xxh3":
                self.tensors(name).check_all()
            elif entry is not None:
                with self._open(name) as file:
                    self._compare(name, entry.sum, digest(file, entry.how))

    def is_in_place(self) -> bool:
        """Tell whether no other folder has taken its place, or its name, since it was opened."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._handle))

    def _entry(self, name: str) -> FileEntry | None:
        if self.manifest is None:
            return None
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.path} is damaged: {MANIFEST} does not name {name!r}")
        return self.manifest.files[name]

    def _check_size(self, name: str, entry: FileEntry) -> None:
        size = os.stat(name, dir_fd=self._handle).st_size if self._is_file(name) else None
        if size != entry.size:
            found = "missing" if size is None else f"torn: {size} bytes instead of {entry.size}"
            raise CheckpointError(f"{self.path / name} is {found}\nhint: load another checkpoint")

    def _compare(self, name: str, wanted: str, found: str | None) -> None:
        if found != wanted:
            raise CheckpointError(
                f"{self.path / name} is damaged: its sum is {found}, that of {MANIFEST} {wanted}"
                "\nhint: load another checkpoint"
            )

    def _open(self, name: str) -> BinaryIO:
        return open_regular(self._checked(name), CheckpointError, self._handle)

    def _read(self, name: str) -> bytes:
        return read_bytes(self._checked(name), CheckpointError, self._handle)

    def _checked(self, name: str) -> str:
        """Return the name of a file in it, which has the size that the manifest says."""
        if name != MANIFEST and (entry := self._entry(name)) is not None:
            self._check_size(name, entry)
        return checked_name(name, self.path)

    def _is_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._handle).st_mode)
        except (OSError, ValueError):
            return False
