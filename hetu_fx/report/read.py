"""Reading the log of a run, line by line: entries as this release writes them, whichever release has written them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hetu_fx.base.documents import json_of, open_regular
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.report.entry_forms import checked_entry
from hetu_fx.report.run_log import FORMAT, Entry

_FORMATS = ("hetu_fx.log/1", FORMAT)

MOST_LINE_BYTES = 64 << 20
"""Of a line; the longest, the start of a job of 1,024 devices, has half a million."""


def read_log(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """Read a log of any length; a last line cut short by a kill is left out.

    Raises:
        EnvironmentProblem: the file cannot be read.
        StateError: it is no log, one of a format that this release does not know, or an entry is not as hetu_fx writes
            it: the error names line and key.
    """
    found = list[Entry]()
    for where, value in _values(path):
        if not found:
            _check_start(path, value)
        found.append(checked_entry(value, where))
    if not found:
        _check_start(path, None)
    return tuple(found)


def _values(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yield where a line is, and what it says."""
    with open_regular(path, EnvironmentProblem) as file:
        torn: StateError | None = None
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
            if torn is not None:
                raise torn
            where = f"line {number} of {os.fspath(path)}"
            if len(line) > MOST_LINE_BYTES:
                raise StateError(f"{where} has more than {MOST_LINE_BYTES} bytes; give a log as hetu_fx wrote it")
            try:
                value = json_of(line, where, StateError, constants=True)
            except StateError as problem:
                torn = problem
            else:
                yield where, value


def _check_start(path: str | os.PathLike[str], value: Any) -> None:
    """Raise `StateError` where the first entry is none of a log that can be read."""
    told = value.get("format") if isinstance(value, dict) else None
    if told in _FORMATS and value.get("event") == "start":
        return
    if str(told).startswith("hetu_fx.log/") and told not in _FORMATS:
        raise StateError(
            f"{os.fspath(path)} is a log of the format {told!r}; this release reads {', '.join(_FORMATS)}; read it "
            f"with the release of hetu_fx that wrote it, or a newer one"
        )
    raise StateError(f"{os.fspath(path)} is not a log of the format {FORMAT!r}; give a file of model.hetu.log")
