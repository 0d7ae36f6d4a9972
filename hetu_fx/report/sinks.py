"""Where a run's log goes: a file of JSON lines, a line of progress, TensorBoard's scalars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from hetu_fx.errors import EnvironmentProblem
from hetu_fx.report.run_log import Entry
from hetu_fx.report.summary import entry_text

PROGRESS_WIDTH = 100
QUIET = ("step", "evaluation", "memory")
"""What happens all the time: only the last such entry is shown."""


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


class Scalars:
    """Gives what is a number to TensorBoard, or to any writer with its `add_scalar(tag, value, step)`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def tell(self, entry: Entry) -> None:
        """Write the numbers of an entry."""
        for tag, value in _scalars(entry):
            self._writer.add_scalar(f"hetu_fx/{tag}", value, entry["step"])

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def _scalars(entry: Entry) -> Iterator[tuple[str, float]]:
    if entry["event"] == "step":
        yield "step_seconds", entry["seconds"]
        yield "longest", entry["longest"]
        if entry["loss"] is not None:
            yield "loss", entry["loss"]
        if entry["predicted_seconds"] is not None:
            yield "predicted_seconds", entry["predicted_seconds"]
        for what in ("compute_seconds", "host_seconds"):
            yield from ((f"{what}/{rank}", seconds) for rank, seconds in enumerate(entry[what]))
    elif entry["event"] == "health":
        yield from ((f"rate/{device}", rate) for device, rate in entry["rates"].items())


def tensorboard_writer(folder: str | os.PathLike[str]) -> Any:
    """Return TensorBoard's writer. Raises `EnvironmentProblem` where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise EnvironmentProblem("scalars need TensorBoard; pip install tensorboard, or leave them out") from error
    return SummaryWriter(os.fspath(folder))
