"""Where a run's log goes: a file of JSON lines, a line of progress, functions of the script."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from hetu_fx.base.documents import nearest
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.report.summary import CHANGES, entry_text
from hetu_fx.report.updates import Entry

EVENTS = ("step", "evaluation", *CHANGES, "memory", "gathered")
"""What functions of the script can be called for; `hetu_fx.report.run_log` says what each has."""

PROGRESS_WIDTH = 100
QUIET = ("step", "evaluation", "memory", "trace")
"""What happens all the time: only the last such entry is shown."""


def check_event(event: str) -> None:
    """Raise `StateError` for an event that functions of the script cannot be called for."""
    if event not in EVENTS:
        raise StateError(f"there is no event {event!r}{nearest(event, EVENTS)}\nhint: use one of {', '.join(EVENTS)}")


class JsonLines:
    """Writes each entry as a line of a file (a new one, or with `mode` "a" at its end), at once.

    What a run that is killed has told stays told.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Literal["w", "a"] = "w") -> None:
        try:
            self._file = Path(path).open(mode, encoding="utf-8", buffering=1)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write the log {os.fspath(path)}: {error.strerror}") from error

    def tell(self, entry: Entry) -> None:
        """Write an entry."""
        self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProgressSink:
    """Says on a stream what happens: on a terminal the last step on a line that is written over, elsewhere changes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._overwrites = self._stream.isatty()

    def tell(self, entry: Entry) -> None:
        """Say an entry."""
        is_change = entry["event"] not in QUIET
        if self._overwrites:
            self._stream.write(f"\r{entry_text(entry):<{PROGRESS_WIDTH}}" + "\n" * is_change)
        elif is_change:
            self._stream.write(entry_text(entry) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the line."""
        if self._overwrites:
            self._stream.write("\n")


class LogEntry(dict[str, Any]):
    """An entry as functions get it that the script has registered: a mapping, whose numbers trackers take as they are.

    `numbers` has them by flat names: of a step `loss`, `seconds`, `rows_per_second`, `compute_seconds/0` and so on.
    """

    @property
    def numbers(self) -> dict[str, float]:
        """Return all numbers of the entry but its own number and its time."""
        return dict(_numbers({name: value for name, value in self.items() if name not in ("step", "time")}))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in _numbers({str(k): v for k, v in value.items()}))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


class CallSink:
    """Calls a function with each entry of one kind.

    What the function raises is no reason to stop a step that other ranks have begun: it is warned of the first time,
    with its traceback, and training goes on. What is no `Exception` (SystemExit, KeyboardInterrupt) passes.
    """

    def __init__(self, event: str, function: Callable[[LogEntry], object]) -> None:
        self.event, self._function, self._has_failed = event, function, False

    def tell(self, entry: Entry) -> None:
        """Call the function, if the entry is of its kind."""
        if entry["event"] != self.event:
            return
        try:
            self._function(LogEntry(entry))
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                told = "".join(traceback.format_exception(error))
                warnings.warn(
                    f'the function of model.hetu.on("{self.event}") failed at step {entry["step"]}; training '
                    f"continues, and later failures of it give no warning:\n{told}",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Call it no more; there is nothing to close."""
