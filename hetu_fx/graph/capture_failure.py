"""Say why a model could not be captured, with the user's line and what is left to do."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from hetu_fx.base import torch_private
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta

WAY_OUT = (
    'rewrite the line, or use hetu_fx.auto_parallelize(..., capture="eager"), which runs the module '
    "as it is, data parallel with uneven shares"
)
SAID_AT = "The following call raised this error:"


def explain_failure(error: Exception) -> CaptureError:
    """Make the error that the user sees of one that torch.export raised."""
    line = _line_in_message(str(error)) or _line_in_traceback(error.__traceback__) or "unknown line"
    return CaptureError(f"cannot capture the model at {line}: {_reason(error)}; {WAY_OUT}")


@contextlib.contextmanager
def watch_fixed_sizes() -> Iterator[list[str]]:
    """Collect "file.py:41" of every line at which a trace inside the context fixes a dynamic size.

    torch.export says which size was fixed, and not where; so this looks at the stack when it happens. If
    torch changes this inner function, the lines are left out and nothing else changes.
    """
    lines: list[str] = []

    def note(value: Any) -> None:
        line = _line_in_frames(traceback.extract_stack())
        if value.is_number and line is not None:
            lines.append(line)

    with torch_private.watching_sizes(note):
        yield lines


def line_of_caller() -> str:
    """Return "file.py:41" of the user's innermost line that is running."""
    return _line_in_frames(traceback.extract_stack()) or "unknown line"


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}".rstrip(".")


def _line_in_message(message: str) -> str | None:
    frame = meta.innermost_frame(message.partition(SAID_AT)[2])
    return _short(*frame) if frame else None


def _line_in_traceback(trace: TracebackType | None) -> str | None:
    return _line_in_frames(traceback.extract_tb(trace))


def _line_in_frames(frames: traceback.StackSummary) -> str | None:
    hidden = (*meta.NOT_THE_USERS, contextlib.__file__, torch_private.__file__)
    outside = [frame for frame in frames if not frame.filename.startswith(hidden)]
    return _short(outside[-1].filename, outside[-1].lineno or 0) if outside else None


def _short(path: str, line: int) -> str:
    return f"{os.path.basename(path)}:{line}"
