"""Say why a model could not be captured, with the user's line and what is left to do."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta

OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
WAY_OUT = (
    'rewrite the line, or use hetu_fx.auto_parallelize(..., capture="eager"), which runs the module '
    "as it is, data parallel with uneven shares"
)
SAID_AT = "The following call raised this error:"


def explain_failure(error: Exception) -> CaptureError:
    """Make the error that the user sees of one that torch.export raised."""
    if isinstance(error, CaptureError):
        return error
    line = _line_in_message(str(error)) or _line_in_traceback(error.__traceback__) or "unknown line"
    return CaptureError(f"cannot capture the model at {line}: {_reason(error)}; {WAY_OUT}")


def line_that_fixes(exported: ExportedProgram) -> str | None:
    """Return "file.py:41" of the line that fixed a size which could have been dynamic, if one is known."""
    for node in exported.graph.nodes:
        example = node.meta.get("val")
        if isinstance(example, torch._subclasses.FakeTensor) and example.fake_mode.shape_env is not None:
            return _first_equality(example.fake_mode.shape_env)
    return None


def _first_equality(shape_env: ShapeEnv) -> str | None:
    for guard in shape_env.guards:
        if guard.expr.func.__name__ == "Equality" and guard.expr.rhs.is_number:
            frame = guard.sloc.framework_loc
            if isinstance(frame, traceback.FrameSummary):
                return _short(frame.filename, frame.lineno or 0)
    return None


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}".rstrip(".")


def _line_in_message(message: str) -> str | None:
    frame = meta.innermost_frame(message.partition(SAID_AT)[2])
    return _short(*frame) if frame else None


def _line_in_traceback(trace: TracebackType | None) -> str | None:
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(trace)]
    outside = [frame for frame in frames if not frame[0].startswith((meta.TORCH_FOLDER, OWN_FOLDER))]
    return _short(*outside[-1]) if outside else None


def _short(path: str, line: int) -> str:
    return f"{os.path.basename(path)}:{line}"
