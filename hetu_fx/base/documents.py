"""Documents on disk: JSON is read strictly and written for people, files are written without tearing."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetu_fx.errors import HetuFxError


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known word, or the list of them when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(sorted(known))})"


def kind_of(value: object) -> str:
    """Name a JSON value's type as JSON does, with the value, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    text = json.dumps(value, default=str)
    return f"{name}: {text if len(text) <= 60 else text[:57] + '...'}"


def read_json(path: str | os.PathLike[str], error: type[HetuFxError]) -> Any:
    """Read a JSON file strictly: no key twice, no NaN; raise `error` with the path and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except OSError as problem:
        raise error(f"cannot read {os.fspath(path)}: {problem.strerror}") from problem
    except ValueError as problem:
        raise error(f"{os.fspath(path)} is not valid JSON: {problem}") from problem


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = [key for key, _ in pairs if sum(key == k for k, _ in pairs) > 1]
        raise ValueError(f"key {twice[0]!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


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
        os.chmod(aside, _mode_of(target))
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    sync(target.parent)


def _mode_of(target: Path) -> int:
    """Keep an existing file's permissions; mkstemp's 0600 would hide a new one from everybody else."""
    if target.exists():
        return target.stat().st_mode & 0o777
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


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain text table with left-aligned columns, no trailing blanks."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
