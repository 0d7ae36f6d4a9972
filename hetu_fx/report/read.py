"""Reading the log of a run: entries as this release writes them, whichever release has written the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hetu_fx.base.documents import json_of, read_bytes, told_as_damaged
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.report.run_log import FORMAT, Entry

_KEYS_SINCE_1: Mapping[str, Mapping[str, Any]] = {
    "start": {"plans": (), "cluster": None, "profile": None},
    "plan": {"rates": {}},
    "step": {"loss": None},
    "evaluation": {"loss": None},
}
"""What entries of the first format lack, by kind, and what stands for it: nobody knows."""


def _since_1(entry: Entry) -> Entry:
    return {**_KEYS_SINCE_1.get(entry["event"], {}), **entry}


_READERS: Mapping[str, Callable[[Entry], Entry]] = {FORMAT: lambda entry: entry, "hetu_fx.log/1": _since_1}
"""By format: what makes an entry one of this release's."""


def read_log(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """Read a log; a last line cut short by a kill is left out.

    Raises:
        EnvironmentProblem: the file cannot be read.
        StateError: it is no log, or one of a format that this release does not know.
    """
    found = list(_entries(path, read_bytes(path, EnvironmentProblem).splitlines()))
    reader = _READERS[_format(path, found)]
    with told_as_damaged(os.fspath(path), StateError):
        return tuple(map(reader, found))


def _entries(path: str | os.PathLike[str], lines: Sequence[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        try:
            yield json_of(line, f"line {number} of {path}", StateError, constants=True)
        except StateError:
            if number < len(lines):
                raise


def _format(path: str | os.PathLike[str], found: Sequence[Entry]) -> str:
    """Return the format that a log says it has; raises `StateError` for one that cannot be read."""
    told = found[0].get("format") if found and isinstance(found[0], dict) else None
    if told in _READERS:
        return str(told)
    if str(told).startswith("hetu_fx.log/"):
        raise StateError(
            f"{path} is a log of the format {told!r}; this release reads {', '.join(sorted(_READERS))}; read it "
            f"with the release of hetu_fx that wrote it, or a newer one"
        )
    raise StateError(f"{path} is not a log of the format {FORMAT!r}; give a file of model.hetu.log")
