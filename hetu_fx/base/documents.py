"""JSON documents: read strictly, written for people, without tearing; and the folders that answers are kept in."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from hetu_fx.errors import HetuFxError


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known word, or the list of them when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(sorted(known))})"


def json_kind(value: object) -> str:
    """Name a JSON value's type as JSON does, with the value, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    text = json.dumps(value, default=str)
    return f"{name}: {text if len(text) <= 60 else text[:57] + '...'}"


MOST_BYTES = 256 << 20
"""Of a document; a training state has some 500 for each parameter."""


def read_json(path: str | os.PathLike[str], error: type[HetuFxError]) -> Any:
    """Read a JSON file strictly, as `parse_json` does; it must be a regular file, of `MOST_BYTES` at most.

    Raises:
        HetuFxError: `error`, with the path and the line.
    """
    return parse_json(read_bytes(path, error), os.fspath(path), error)


def read_bytes(path: str | os.PathLike[str], error: type[HetuFxError], folder: int | None = None) -> bytes:
    """Read a document, of `MOST_BYTES` at most; see `open_regular`."""
    with open_regular(path, error, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise error(f"cannot read {os.fspath(path)}: it has {size} bytes, but a document has {MOST_BYTES} at most")
        return file.read(size)


@contextmanager
def told_as_damaged(where: str, error: type[HetuFxError]) -> Iterator[None]:
    """Raise `error` where what a document means cannot be read, as it has another form than what was written."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        raise error(f"{where} is damaged: {type(problem).__name__}: {problem}") from problem


def parse_json(data: bytes | str, where: str, error: type[HetuFxError], *, constants: bool = False) -> Any:
    """Return what a JSON text means, read strictly: no key twice, no number too large, no endless nesting.

    Args:
        data: the text, or its bytes.
        where: it stands, for errors.
        error: what is raised otherwise, with the line.
        constants: take NaN and Infinity too, as Python writes them.
    """
    constant = float if constants else _refuse_constant
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_float=_finite)
    except ValueError as problem:
        raise error(f"{where} is not valid JSON: {problem}") from problem
    except RecursionError as problem:
        raise error(f"{where} is not valid JSON: values are nested too deeply") from problem


def open_regular(
    path: str | os.PathLike[str], error: type[HetuFxError], folder: int | None = None, *, writable: bool = False
) -> BinaryIO:
    """Open a regular file for reading; never waits, as a pipe would have it.

    Args:
        path: to be read.
        error: what is raised where it cannot be.
        folder: an open folder that a relative `path` stands in.
        writable: open it for writing too.
    """
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        handle = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except (OSError, ValueError) as problem:  # a name with a NUL in it is a ValueError
        raise error(f"cannot read {os.fspath(path)}: {getattr(problem, 'strerror', problem)}") from problem
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"cannot read {os.fspath(path)}: it is no regular file")
    return open(handle, "r+b" if writable else "rb")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = [key for key, _ in pairs if sum(key == k for k, _ in pairs) > 1]
        raise ValueError(f"key {twice[0]!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


def json_text(value: Any, indent: int = 0, width: int = 100) -> str:
    """Return JSON for people: what fits on a line stands on one line."""
    line = json.dumps(value)
    if len(line) + indent <= width or not isinstance(value, (dict, list)):
        return line
    inner = indent + 1
    pad = "\n" + " " * inner
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {json_text(v, inner, width)}" for k, v in value.items()]
        return "{" + ("," + pad).join(items) + "}"
    return "[" + pad + ("," + pad).join(json_text(v, inner, width) for v in value) + "]"


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file such that a reader, or a crash, sees the old file or the new one and nothing between.

    The text is written aside in the same folder, flushed to disk, and renamed over `path`.
    """
    target = Path(path)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, target.stat().st_mode & 0o777 if target.exists() else _usual_mode())
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    sync(target.parent)


def _usual_mode() -> int:
    """Return the permissions of a new file; what makes files of 0600 hides them from everybody else."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def sync(path: Path) -> None:
    """Make a file, or which files a folder has, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def sources_digest(*packages: ModuleType) -> str:
    """Return a digest of the sources of packages: what was right before a change of them need not be after it."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(package.__path__[0])
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_folder(kind: str) -> Path:
    """Return where something is kept for this user: $XDG_CACHE_HOME/hetu_fx/KIND, or ~/.cache/hetu_fx/KIND."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hetu_fx" / kind
